"""Derives the place of each tensor in the engine's parameters from the record of a `Trace`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, dropwhile
from operator import eq

import torch
from torch import Tensor

from ckptkit.verify.witnesses.loading.region import Region
from ckptkit.verify.witnesses.loading.trace import Block, Source, Trace, Write, span

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter that came from one tensor."""

    tensor: str
    param: str
    into: Region  # of the parameter's block, viewed as `dtype`
    dtype: torch.dtype
    part: Region | None  # of the tensor, or None if the elements are no regular part of it
    read_as: torch.dtype | None = None  # the dtype as which `part` is viewed, if not its own
    numbers: Tensor | None = None  # without `part`: the element at each place of `into`, or -1 for another tensor's
    through: torch.dtype | None = None  # an intermediate dtype
    surviving: Tensor | None = None  # a mask of the elements that were not overwritten later, or None for all

    def actual(self, parameter: Tensor) -> Tensor:
        """The elements of the parameter there."""
        elements = self.into.of(flat_elements(parameter).view(self.dtype))
        return elements if self._mask is None else elements[self._mask.to(elements.device)]

    def taken(self, given: Tensor) -> Tensor:
        """The same elements of the checkpoint's tensor, in the order of `actual`."""
        elements = given.reshape(-1)
        if self.part is None:
            return elements[self.numbers[self._mask].to(elements.device)]  # type: ignore[index]
        part = self.part.of(elements if self.read_as is None else elements.view(self.read_as))
        return part if self.surviving is None else part[self.surviving.to(part.device)]

    def cast(self, taken: Tensor) -> Tensor:
        """Casts them to the dtype of `actual`: the values that the parameter must hold."""
        return (taken if self.through is None else taken.to(self.through)).to(self.dtype)

    def parts(self) -> list[Region]:
        if self.part is None:
            numbers = self.numbers[self._mask].cpu()  # type: ignore[index]
        elif self.surviving is None:
            return [self.part]
        else:
            numbers = self.part.of(torch.arange(self.part.end))[self.surviving.cpu()]
        numbers = torch.unique(numbers)
        starts = torch.cat([numbers[:1], numbers[1:][numbers.diff() != 1]]).tolist()
        ends = torch.cat([numbers[:-1][numbers.diff() != 1], numbers[-1:]]).tolist()
        return [Region(start, (end + 1 - start,), (1,)) for start, end in zip(starts, ends, strict=True)]

    @property
    def fills_its_place(self) -> bool:
        return self.surviving is None and (self.numbers is None or bool((self.numbers >= 0).all()))

    @cached_property
    def _mask(self) -> Tensor | None:
        if self.numbers is None:
            return self.surviving
        own = self.numbers >= 0
        return own if self.surviving is None else own & self.surviving.to(own.device)


@dataclass(frozen=True)
class Placement:
    """The places of every tensor that was given to the engine."""

    pieces: Mapping[str, Sequence[Piece]]
    written: Mapping[str, Sequence[Piece]]  # pieces copied unchanged, including those that were overwritten later
    computed: Mapping[str, frozenset[str]]  # parameters with computed elements, and the tensors that these came from

    @staticmethod
    def of(trace: Trace, parameters: Mapping[str, Tensor]) -> Placement:
        """`parameters` as they are after loading. One with several names is listed under the first."""
        pieces: dict[str, list[Piece]] = {name: [] for name in trace.given}
        written: dict[str, list[Piece]] = {name: [] for name in trace.given}
        computed: dict[str, frozenset[str]] = {}
        seen: set[tuple[Block, Region | None]] = set()
        numbering = _Numbering(trace.given)
        for name, tensor in parameters.items():
            if (source := trace.source(tensor)) is None:
                continue
            place = source.block, source.region if source.block.made else None  # engines join weights, and cut views
            if place in seen:
                continue
            seen.add(place)
            writes = _writes_of(source, tensor)
            for piece in filter(None, (_copied(name, write) for write in writes)):
                written[piece.tensor].append(piece)
            for write, surviving in _surviving(writes):
                copied = [] if write.source is None else list(numbering.pieces(name, write, surviving))
                for piece in copied:
                    pieces[piece.tensor].append(piece)
                origins = _computed(write) - {piece.tensor for piece in copied}
                masks = [piece.numbers >= 0 for piece in copied if piece.numbers is not None]
                if origins and not (masks and bool(torch.stack(masks).any(0).all())):  # some element is in no piece
                    computed[name] = computed.get(name, frozenset()) | origins
        return Placement(pieces, written, computed)

    def parts(self, name: str) -> list[Region]:
        return [region for piece in self.pieces.get(name, ()) for region in piece.parts()]

    @cached_property
    def _by_pattern(self) -> Mapping[str, list[Piece]]:
        single: dict[str, list[Piece]] = defaultdict(list)
        for name, copied in self.written.items():
            pieces = copied or [piece for piece in self.pieces[name] if piece.fills_its_place]
            if len(pieces) == 1:
                single[_NUMBER.sub("#", name)].append(pieces[0])
        return single

    def predicted(self, name: str) -> tuple[str, Region] | None:
        """The place of a missing tensor, extrapolated from tensors with the same name except for numbers, or None."""
        if not (similar := self._by_pattern.get(_NUMBER.sub("#", name))):
            return None
        target = _numbers(name)
        base = max(similar, key=lambda piece: sum(map(eq, _numbers(piece.tensor), target)))
        offset, param = base.into.offset, _numbers(base.param)
        for at, (start, end) in enumerate(zip(_numbers(base.tensor), target, strict=True)):
            if start == end:
                continue
            if (step := self._step(similar, base, at)) is None:
                return None
            offset += step[0] * (end - start)
            param = [number + change * (end - start) for number, change in zip(param, step[1], strict=True)]
        values = iter(param)
        return _NUMBER.sub(lambda _: str(next(values)), base.param), replace(base.into, offset=offset)

    @staticmethod
    def _step(similar: Sequence[Piece], base: Piece, at: int) -> tuple[int, list[int]] | None:
        """The change of the offset, and of the numbers in the parameter's name, by one number of the tensor's name."""
        numbers = _numbers(base.tensor)
        for piece in similar:
            differences = [after - before for before, after in zip(numbers, _numbers(piece.tensor), strict=True)]
            if (change := differences[at]) and sum(map(bool, differences)) == 1:
                moved = piece.into.offset - base.into.offset
                pairs = zip(_numbers(base.param), _numbers(piece.param), strict=True)
                return moved // change, [(after - before) // change for before, after in pairs]
        return None


def flat_elements(parameter: Tensor) -> Tensor:
    """All elements of a parameter in the order of their addresses."""
    return parameter.detach().as_strided((span(parameter),), (1,))


def whole(parameter: Tensor) -> Region:
    return Region(0, (parameter.numel(),), (1,))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _computed(write: Write) -> frozenset[str]:
    """The tensors from which the written values may be computed."""
    if write.source is None:
        return write.computed
    block = write.source.block
    if block.given is None:
        return block.origins
    return frozenset[str]().union(*(one.computed for one in block.writes[: write.source.writes]))


def _writes_of(source: Source, parameter: Tensor) -> Sequence[Write]:
    """The writes into a parameter, within its bounds if the loader replaced its memory by a tensor given or made."""
    block, region = source.block, source.region
    if block.given is None and block.made is None:
        return block.writes
    own = [
        replace(write, into=replace(write.into, offset=write.into.offset - region.offset))
        for write in block.writes
        if region.offset <= write.into.offset < region.end
    ]
    return [Write(Region(0, region.sizes, region.strides), parameter.dtype, source), *own]


def _surviving(writes: Sequence[Write]) -> Iterator[tuple[Write, Tensor | None]]:
    """Each write that is not completely overwritten, with a mask of its remaining elements, or None for all."""
    # The first writes may set all elements to a constant, which would overlap everything.
    writes = list(dropwhile(lambda write: write.source is None and not write.computed, writes))
    order = sorted(range(len(writes)), key=lambda at: writes[at].into.offset)
    group: list[int] = []
    end = 0
    for at in [*order, None]:
        if group and (at is None or writes[at].into.offset >= end):
            yield from _surviving_in_group([writes[one] for one in sorted(group)])
            group = []
        if at is not None:
            group.append(at)
            end = max(end, writes[at].into.end)


def _surviving_in_group(writes: Sequence[Write]) -> Iterator[tuple[Write, Tensor | None]]:
    """The same for writes that may overlap, in order."""
    if len(writes) == 1:
        yield writes[0], None
        return
    start = min(write.into.offset for write in writes)
    canvas = torch.full((max(write.into.end for write in writes) - start,), -1, dtype=torch.int32)
    shifted = [replace(write.into, offset=write.into.offset - start) for write in writes]
    for number, region in enumerate(shifted):
        region.of(canvas).fill_(number)
    for number, (write, region) in enumerate(zip(writes, shifted, strict=True)):
        surviving = region.of(canvas) == number
        if bool(surviving.all()):
            yield write, None
        elif bool(surviving.any()):
            yield write, surviving


def _copied(param: str, write: Write) -> Piece | None:
    """The piece of a write that copies part of a tensor, or None for any other write."""
    source = write.source
    if source is None or source.block.given is None or source.writes:
        return None
    read_as = None if source.dtype == source.block.dtype else source.dtype
    return Piece(source.block.given, param, write.into, write.dtype, source.region, read_as)


class _Numbering:
    """Numbers all elements of all tensors, so that results of operations can be traced back to them."""

    def __init__(self, given: Mapping[str, Block]) -> None:
        ends = accumulate(block.numel for block in given.values())
        self._spans = {name: (end - block.numel, end) for (name, block), end in zip(given.items(), ends, strict=True)}

    def pieces(self, param: str, write: Write, surviving: Tensor | None) -> Iterator[Piece]:
        if (copied := _copied(param, write)) is not None:
            yield replace(copied, surviving=surviving)
            return
        source = write.source
        assert source is not None
        numbers = self._numbers_of(source)
        for name in sorted(source.block.origins):
            start, end = self._spans[name]
            own = torch.where((numbers >= start) & (numbers < end), numbers - start, -1)
            if bool((own >= 0).any()):
                piece = Piece(name, param, write.into, write.dtype, None, numbers=own, through=source.block.dtype)
                yield replace(piece, surviving=surviving)

    def _numbers_of(self, source: Source) -> Tensor:
        return source.region.of(self._block(source.block, source.writes))

    def _block(self, block: Block, writes: int) -> Tensor:
        """The numbers of a block's elements in the order of their addresses, or -1 for elements of no tensor."""
        numbers = torch.full((block.numel,), -1, dtype=torch.int64)
        if block.given is not None:
            numbers = torch.arange(*self._spans[block.given])
        elif block.made is not None:
            run, region = block.made
            region.of(numbers).copy_(run(self._numbers_of))
        for write in block.writes[:writes]:
            write.into.of(numbers).copy_(self._numbers_of(write.source) if write.source else torch.tensor(-1))
        return numbers
