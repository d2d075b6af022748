"""Where an engine keeps each tensor of a checkpoint, worked out of what `Trace` saw while it was loaded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, dropwhile

import torch
from torch import Tensor

from ckptkit.verify.witnesses.loading.region import Region
from ckptkit.verify.witnesses.loading.trace import Block, Source, Trace, Write, span

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter that came from one tensor."""

    tensor: str  # as it was given
    param: str
    into: Region  # of the parameter's block, seen as `dtype`
    dtype: torch.dtype
    part: Region | None  # of the tensor; None where the elements are not a regular part of it
    read_as: torch.dtype | None = None  # what `part` is seen as; None: its own dtype
    numbers: Tensor | None = None  # without `part`: which element stands at each place of `into`, -1: another tensor's
    through: torch.dtype | None = None  # a dtype that they had on the way
    surviving: Tensor | None = None  # which were not overwritten later; None: all

    def actual(self, parameter: Tensor) -> Tensor:
        """What stands in the parameter there."""
        found = self.into.of(flat_elements(parameter).view(self.dtype))
        return found if self._mask is None else found[self._mask.to(found.device)]

    def taken(self, given: Tensor) -> Tensor:
        """Those elements of the tensor as the checkpoint has it, in the order of `actual`."""
        elements = given.reshape(-1)
        if self.part is None:
            return elements[self.numbers[self._mask].to(elements.device)]  # type: ignore[index]
        found = self.part.of(elements if self.read_as is None else elements.view(self.read_as))
        return found if self.surviving is None else found[self.surviving.to(found.device)]

    def cast(self, taken: Tensor) -> Tensor:
        """The same in the dtype of `actual`, which is what must stand there."""
        return (taken if self.through is None else taken.to(self.through)).to(self.dtype)

    def parts(self) -> list[Region]:
        """The elements of the given tensor that stand here."""
        if self.part is not None and self.surviving is None:
            return [self.part]
        if self.part is not None:
            numbers = self.part.of(torch.arange(self.part.end))[self.surviving.cpu()]  # type: ignore[union-attr]
        else:
            numbers = self.numbers[self._mask].cpu()  # type: ignore[index]
        numbers = torch.unique(numbers)
        starts = torch.cat([numbers[:1], numbers[1:][numbers.diff() != 1]]).tolist()
        ends = torch.cat([numbers[:-1][numbers.diff() != 1], numbers[-1:]]).tolist()
        return [Region(start, (end + 1 - start,), (1,)) for start, end in zip(starts, ends, strict=True)]

    @property
    def fills_its_place(self) -> bool:
        """Whether every element of `into` is of this tensor."""
        return self.surviving is None and (self.numbers is None or bool((self.numbers >= 0).all()))

    @cached_property
    def _mask(self) -> Tensor | None:
        if self.numbers is None:
            return self.surviving
        own = self.numbers >= 0
        return own if self.surviving is None else own & self.surviving.to(own.device)


@dataclass(frozen=True)
class Placement:
    """Where every tensor that was given stands."""

    pieces: Mapping[str, Sequence[Piece]]
    written: Mapping[str, Sequence[Piece]]  # those copied as they are, with those that were overwritten later
    computed: Mapping[str, frozenset[str]]  # parameters with elements that were computed, and of which tensors

    @staticmethod
    def of(trace: Trace, parameters: Mapping[str, Tensor]) -> Placement:
        """`parameters` as they are after loading, by name; one under several names is known by the first."""
        pieces: dict[str, list[Piece]] = {name: [] for name in trace.given}
        written: dict[str, list[Piece]] = {name: [] for name in trace.given}
        computed: dict[str, frozenset[str]] = {}
        seen: set[tuple[Block, Region | None]] = set()
        numbering = _Numbering(trace.given)
        for name, tensor in parameters.items():
            source = trace.source(tensor)
            if source is None:
                continue
            place = source.block, source.region if source.block.made else None  # engines join weights, and cut views
            if place in seen:
                continue
            seen.add(place)
            writes = _writes_of(source, tensor)
            for write in writes:
                if (piece := _copied(name, write)) is not None:
                    written[piece.tensor].append(piece)
            for write, surviving in _surviving(writes):
                found = [] if write.source is None else list(numbering.pieces(name, write, surviving))
                for piece in found:
                    pieces[piece.tensor].append(piece)
                of = _computed(write) - {piece.tensor for piece in found}
                known = [piece.numbers >= 0 for piece in found if piece.numbers is not None]
                if of and not (known and bool(torch.stack(known).any(0).all())):  # not every element is of a piece
                    computed[name] = computed.get(name, frozenset()) | of
        return Placement(pieces, written, computed)

    def parts(self, name: str) -> list[Region]:
        """Which elements of a given tensor stand in parameters."""
        return [region for piece in self.pieces.get(name, ()) for region in piece.parts()]

    @cached_property
    def _by_pattern(self) -> Mapping[str, list[Piece]]:
        found: dict[str, list[Piece]] = defaultdict(list)
        for name, copied in self.written.items():
            pieces = copied or [piece for piece in self.pieces[name] if piece.fills_its_place]
            if len(pieces) == 1:
                found[_NUMBER.sub("#", name)].append(pieces[0])
        return found

    def predicted(self, name: str) -> tuple[str, Region] | None:
        """Where a tensor that was not given belongs, told from tensors whose names differ in numbers only.

        None where there are none, or where they say nothing of its numbers.
        """
        similar = self._by_pattern.get(_NUMBER.sub("#", name))
        if not similar:
            return None
        wanted = _numbers(name)
        base = max(similar, key=lambda piece: _agreeing(_numbers(piece.tensor), wanted))
        numbers = _numbers(base.tensor)
        offset, param = base.into.offset, _numbers(base.param)
        for at, (have, want) in enumerate(zip(numbers, wanted, strict=True)):
            if have == want:
                continue
            step = self._step(similar, base, at)
            if step is None:
                return None
            offset += step[0] * (want - have)
            param = [one + change * (want - have) for one, change in zip(param, step[1], strict=True)]
        values = iter(param)
        return _NUMBER.sub(lambda _: str(next(values)), base.param), Region(offset, base.into.sizes, base.into.strides)

    @staticmethod
    def _step(similar: Sequence[Piece], base: Piece, at: int) -> tuple[int, list[int]] | None:
        """How the offset, and the numbers in the parameter's name, change with one number of the tensor's name."""
        numbers = _numbers(base.tensor)
        for piece in similar:
            other = _numbers(piece.tensor)
            differs = [one != two for one, two in zip(numbers, other, strict=True)]
            if differs[at] and sum(differs) == 1:
                change = other[at] - numbers[at]
                moved = piece.into.offset - base.into.offset
                names = [two - one for one, two in zip(_numbers(base.param), _numbers(piece.param), strict=True)]
                return moved // change, [one // change for one in names]
        return None


def flat_elements(parameter: Tensor) -> Tensor:
    """All elements of a parameter in the order of their addresses."""
    return parameter.detach().as_strided((span(parameter),), (1,))


def whole(parameter: Tensor) -> Region:
    """All elements of a parameter."""
    return Region(0, (parameter.numel(),), (1,))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(left == right for left, right in zip(one, other, strict=True))


def _computed(write: Write) -> frozenset[str]:
    """The given tensors that what was written may be computed of."""
    if write.source is None:
        return write.computed
    block = write.source.block
    if block.given is None:
        return block.origins
    return frozenset[str]().union(*(one.computed for one in block.writes[: write.source.writes]))


def _writes_of(source: Source, parameter: Tensor) -> Sequence[Write]:
    """What was written into a parameter; all of it, where the loader replaced its memory by what was given or made.

    A parameter may then be a part of that memory, of which only writes from its own start to its end are its own.
    """
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
    """Each write that is not overwritten as a whole, and which of its elements are not; None: all of them."""
    # What is first made zero, or poisoned, would overlap everything.
    writes = list(dropwhile(lambda write: write.source is None and not write.computed, writes))
    order = sorted(range(len(writes)), key=lambda at: writes[at].into.offset)
    group: list[int] = []
    end = 0
    for at in [*order, None]:
        if group and (at is None or writes[at].into.offset >= end):
            yield from _of_group([writes[one] for one in sorted(group)])
            group = []
        if at is not None:
            group.append(at)
            end = max(end, writes[at].into.end)


def _of_group(writes: Sequence[Write]) -> Iterator[tuple[Write, Tensor | None]]:
    """The same of writes that may overlap, in order."""
    if len(writes) == 1:
        yield writes[0], None
        return
    start = min(write.into.offset for write in writes)
    canvas = torch.full((max(write.into.end for write in writes) - start,), -1, dtype=torch.int32)
    shifted = [Region(write.into.offset - start, write.into.sizes, write.into.strides) for write in writes]
    for number, region in enumerate(shifted):
        region.of(canvas).fill_(number)
    for number, (write, region) in enumerate(zip(writes, shifted, strict=True)):
        surviving = region.of(canvas) == number
        if bool(surviving.all()):
            yield write, None
        elif bool(surviving.any()):
            yield write, surviving


def _copied(param: str, write: Write) -> Piece | None:
    """The piece of a write of part of a tensor as it was given; None for any other write."""
    source = write.source
    if source is None or source.block.given is None or source.writes:
        return None
    seen_as = None if source.dtype == source.block.dtype else source.dtype
    return Piece(source.block.given, param, write.into, write.dtype, source.region, seen_as)


class _Numbering:
    """Numbers all elements of all given tensors, so that what was made of them can be followed back to them."""

    def __init__(self, given: Mapping[str, Block]) -> None:
        ends = accumulate(block.numel for block in given.values())
        self._spans = {name: (end - block.numel, end) for (name, block), end in zip(given.items(), ends, strict=True)}

    def pieces(self, param: str, write: Write, surviving: Tensor | None) -> Iterator[Piece]:
        """The pieces of a write into a parameter."""
        if (copied := _copied(param, write)) is not None:
            yield replace(copied, surviving=surviving)
            return
        source = write.source
        assert source is not None
        numbers = self._of(source)
        for name in sorted(source.block.origins):
            start, end = self._spans[name]
            own = torch.where((numbers >= start) & (numbers < end), numbers - start, -1)
            if bool((own >= 0).any()):
                piece = Piece(name, param, write.into, write.dtype, None, numbers=own, through=source.block.dtype)
                yield replace(piece, surviving=surviving)

    def _of(self, source: Source) -> Tensor:
        return source.region.of(self._block(source.block, source.writes))

    def _block(self, block: Block, writes: int) -> Tensor:
        """The numbers of a block's elements, in the order of their addresses; -1 for one that was not given."""
        numbers = torch.full((block.numel,), -1, dtype=torch.int64)
        if block.given is not None:
            numbers = torch.arange(*self._spans[block.given])
        elif block.made is not None:
            run, region = block.made
            region.of(numbers).copy_(run(self._of))
        for write in block.writes[:writes]:
            write.into.of(numbers).copy_(self._of(write.source) if write.source else torch.tensor(-1))
        return numbers
