"""Reads one or two checkpoints in one pass, compares bytes, and measures equal tensors once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.extents import Extent, byte_ranges_of, extents_of, is_streamable, read_with
from ckptkit.core.specs import TensorSpec
from ckptkit.storage.buffers import BUFFER, elements, tensor_of
from ckptkit.storage.read import ARENA, FileReader
from ckptkit.transfer.copy import cores
from ckptkit.transfer.files import Stream
from ckptkit.verify.evidence.extremes import Extremes, Measurement, extremes, rows_at_once, same_bytes

if TYPE_CHECKING:
    from torch import Tensor

SPARE = 1  # threads in addition to one a core, for those that wait for a disk
_MEMORY = 8 << 30  # bytes for both sides and results over all threads; a single group may need more


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The tensors of two checkpoints under one name. They are valid until the next group is read."""

    name: str
    stats: Extremes  # of `a`, or of `b` if `a` has no such tensor
    is_equal: bool = False  # in dtype, shape and every bit
    a: Tensor | None = None  # None if it is missing, or if both are equal
    b: Tensor | None = None


@dataclass
class BothSides:
    """One checkpoint, or two under common names."""

    a: Checkpoint
    b: Checkpoint | None
    _readers: list[tuple[FileReader, FileReader]] = field(default_factory=list)  # not in use by a thread

    def read(self, names: Sequence[str], unreadable: dict[str, str] | None = None) -> Iterator[TensorPair]:
        """Yields a pair for each name. Raises CkptkitError, or names unreadable tensors of `a` in `unreadable`."""
        try:
            readers = self._readers.pop()
        except IndexError:
            readers = FileReader(), FileReader()
        streamed = {name: both for name in names if (both := self._streamed(name, readers)) is not None}
        yield from streamed.values()
        yield from self._in_memory([name for name in names if name not in streamed], *readers, unreadable)
        self._readers.append(readers)

    def largest(self, groups: Sequence[Sequence[str]]) -> int:
        """Bytes of memory that the largest of these groups needs on one side. Streamed tensors do not count."""
        unstreamed = ([name for name in names if self._extents(name) is None] for names in groups)
        return max((sum(self._sides(name)[0].specs[name].nbytes for name in names) for names in unstreamed), default=0)

    def _sides(self, name: str) -> list[Checkpoint]:
        return [side for side in (self.a, self.b) if side is not None and name in side.specs]

    def _extents(self, name: str) -> list[Sequence[Extent]] | None:
        """The extents of a tensor to compare in pieces, or None for a small or an unreadable one."""
        sides = self._sides(name)
        spec = sides[0].specs[name]
        is_large = spec.nbytes > ARENA and len(spec.shape) > 1 and spec.nbytes // spec.shape[0] <= BUFFER
        is_alike = all((side.specs[name].shape, side.specs[name].dtype) == (spec.shape, spec.dtype) for side in sides)
        if not (is_large and is_alike and all(is_streamable(side, name) for side in sides)):
            return None
        try:
            extents = [one for side in sides if (one := extents_of(side, name)) is not None]
        except (CkptkitError, OSError):
            return None
        return extents if len(extents) == len(sides) else None

    def _streamed(self, name: str, readers: Sequence[FileReader]) -> TensorPair | None:
        """The pair of a large tensor if only one side has it or both are equal, else None, as `_extents`."""
        if (extents := self._extents(name)) is None:
            return None
        try:
            streams = [Stream(name, one, reader) for one, reader in zip(extents, readers, strict=False)]
            stats = _measured(self._sides(name)[0].specs[name], streams)
        except (CkptkitError, OSError):
            return None
        return None if stats is None else TensorPair(name, stats, is_equal=len(streams) > 1)

    def _in_memory(
        self, names: Sequence[str], reader_a: FileReader, reader_b: FileReader, unreadable: dict[str, str] | None
    ) -> Iterator[TensorPair]:
        names_a = [name for name in names if name in self.a.specs]
        reader_a.load(byte_ranges_of(self.a, names_a))
        tensors_a = self._read(names_a, reader_a, unreadable)
        tensors_b: dict[str, Tensor] = {}
        if self.b is not None:
            names_b = [one for one in names if one in self.b.specs and (one in tensors_a or one not in self.a.specs)]
            reader_b.load(byte_ranges_of(self.b, names_b))
            tensors_b = read_with(self.b, names_b, reader_b)
        for name in names:
            a, b = tensors_a.get(name), tensors_b.get(name)
            if a is not None and b is not None and same_bytes(a, b):
                yield TensorPair(name, extremes(a), is_equal=True)
            elif (tensor := b if a is None else a) is not None:
                yield TensorPair(name, extremes(tensor), False, a, b)

    def _read(self, names: Sequence[str], reader: FileReader, unreadable: dict[str, str] | None) -> dict[str, Tensor]:
        try:
            return read_with(self.a, names, reader)
        except CkptkitError as error:
            if unreadable is None:
                raise
            if len(names) > 1:
                parts = (self._read([name], reader, unreadable) for name in names)
                return {name: tensor for part in parts for name, tensor in part.items()}
            unreadable[names[0]] = error.message
            return {}


def _measured(spec: TensorSpec, streams: Sequence[Stream]) -> Extremes | None:
    row = spec.nbytes // spec.shape[0]
    at_once = row * rows_at_once(row)
    piece = at_once * max(1, BUFFER // at_once)
    measurement = Measurement()
    for begin in range(0, spec.nbytes, piece):
        end = min(begin + piece, spec.nbytes)
        content, *copies = (tensor_of(stream.piece(begin, end)) for stream in streams)
        if not all(same_bytes(content, copy) for copy in copies):
            return None
        is_aligned = content.data_ptr() % spec.torch_dtype.itemsize == 0
        flat = elements(content if is_aligned else content.clone(), spec.torch_dtype)
        measurement.add(flat.view((end - begin) // row, -1))
    for stream in streams:
        stream.finish()
    return measurement.result()


def common_groups(left: Checkpoint, right: Checkpoint | None) -> Iterator[tuple[str, ...]]:
    """Yields the groups of `left` in order, merged if a group of `right` spans several."""
    if right is None:
        yield from left.groups
        return
    group_of = {name: index for index, names in enumerate(right.groups) for name in names}
    joined: dict[int, int] = {}
    merged: list[list[str]] = []
    for names in left.groups:
        touched = {group_of[name] for name in names if name in group_of}
        homes = sorted({joined[index] for index in touched if index in joined})
        home = homes[0] if homes else len(merged)
        if not homes:
            merged.append([])
        for other in homes[1:]:
            merged[home] += merged[other]
            merged[other] = []
            joined = {index: home if old == other else old for index, old in joined.items()}
        merged[home] += names
        joined.update(dict.fromkeys(touched, home))
    yield from (tuple(names) for names in merged if names)


@contextmanager
def threads(largest: int, spare: int = 0) -> Iterator[Executor]:
    """A pool of threads, as many as cores + `spare` and as memory permits for groups of `largest` bytes a side."""
    import torch

    before = torch.get_num_threads()  # each thread uses one
    try:
        workers = max(1, min(cores() + spare, _MEMORY // (3 * largest or 1)))
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)
