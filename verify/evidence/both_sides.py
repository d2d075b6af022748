"""Reads two checkpoints, or one, in one pass: equal bytes are found by comparing bytes, and measured once."""

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

SPARE = 1  # threads more than cores: while some wait for a disk the others compute
_MEMORY = 8 << 30  # bytes of tensors in memory over all threads; a single group may need more


@dataclass(frozen=True, slots=True)
class TensorPair:
    """What two checkpoints have under a name. Tensors are valid until the next group is read."""

    name: str
    stats: Extremes  # of `a`, or of `b` where `a` has no such tensor
    is_equal: bool = False  # in dtype, shape and every bit
    a: Tensor | None = None  # None where it has none, or where both are equal
    b: Tensor | None = None


@dataclass
class BothSides:
    """Two checkpoints under common names; `b` None: there is one."""

    a: Checkpoint
    b: Checkpoint | None
    _readers: list[tuple[FileReader, FileReader]] = field(default_factory=list)  # of threads that have ended

    def read(self, names: Sequence[str], unreadable: dict[str, str] | None = None) -> Iterator[TensorPair]:
        """Yields what both sides have under each name, which are read together.

        A tensor of `a` that cannot be read is named in `unreadable`, with the reason, instead of yielded. Raises
        CkptkitError where `unreadable` is None, and for a tensor of `b` that cannot be read.
        """
        try:
            readers = self._readers.pop()
        except IndexError:
            readers = FileReader(), FileReader()
        streamed = {name: both for name in names if (both := self._streamed(name, readers)) is not None}
        yield from streamed.values()
        yield from self._held([name for name in names if name not in streamed], *readers, unreadable)
        self._readers.append(readers)

    def largest(self, groups: Sequence[Sequence[str]]) -> int:
        """Bytes on one side of the largest of these groups, as far as it must be in memory as a whole."""
        held = ([name for name in names if self._extents(name) is None] for names in groups)
        return max((sum(self._sides(name)[0].specs[name].nbytes for name in names) for names in held), default=0)

    def _sides(self, name: str) -> list[Checkpoint]:
        """Those that have a tensor."""
        return [side for side in (self.a, self.b) if side is not None and name in side.specs]

    def _extents(self, name: str) -> list[Sequence[Extent]] | None:
        """Where the files of each side have the rows of a tensor that is so large that pieces of it are compared as
        they are read; None for any other, and where they cannot be read: reading it as a whole gives the error.
        """
        sides = self._sides(name)
        spec = sides[0].specs[name]
        is_large = spec.nbytes > ARENA and len(spec.shape) > 1 and spec.nbytes // spec.shape[0] <= BUFFER
        is_alike = all((side.specs[name].shape, side.specs[name].dtype) == (spec.shape, spec.dtype) for side in sides)
        if not (is_large and is_alike and all(is_streamable(side, name) for side in sides)):
            return None
        try:
            found = [extents for side in sides if (extents := extents_of(side, name)) is not None]
        except (CkptkitError, OSError):
            return None
        return found if len(found) == len(sides) else None

    def _streamed(self, name: str, readers: Sequence[FileReader]) -> TensorPair | None:
        """A large tensor that one side has, or both with the same bytes; None for any other.

        None also for one that cannot be read: reading it as a whole gives the error.
        """
        if (extents := self._extents(name)) is None:
            return None
        try:
            streams = [Stream(name, one, reader) for one, reader in zip(extents, readers, strict=False)]
            stats = _measured(self._sides(name)[0].specs[name], streams)
        except (CkptkitError, OSError):
            return None
        return None if stats is None else TensorPair(name, stats, is_equal=len(streams) > 1)

    def _held(
        self, names: Sequence[str], reader_a: FileReader, reader_b: FileReader, unreadable: dict[str, str] | None
    ) -> Iterator[TensorPair]:
        """As `read`, of tensors that are in memory as a whole."""
        left = [name for name in names if name in self.a.specs]
        reader_a.load(byte_ranges_of(self.a, left))
        tensors = self._read(left, reader_a, unreadable)
        others: dict[str, Tensor] = {}
        if self.b is not None:
            right = [name for name in names if name in self.b.specs and (name in tensors or name not in self.a.specs)]
            reader_b.load(byte_ranges_of(self.b, right))
            others = read_with(self.b, right, reader_b)
        for name in names:
            a, b = tensors.get(name), others.get(name)
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
                found = (self._read([name], reader, unreadable) for name in names)
                return {name: tensor for one in found for name, tensor in one.items()}
            unreadable[names[0]] = error.message
            return {}


def _measured(spec: TensorSpec, streams: Sequence[Stream]) -> Extremes | None:
    """Measures a tensor [rows, ...] piece by piece; None where a piece of the streams is not the same."""
    row = spec.nbytes // spec.shape[0]
    at_once = row * rows_at_once(row)
    piece = at_once * max(1, BUFFER // at_once)
    measurement = Measurement()
    for begin in range(0, spec.nbytes, piece):
        end = min(begin + piece, spec.nbytes)
        content, *others = (tensor_of(stream.piece(begin, end)) for stream in streams)
        if not all(same_bytes(content, other) for other in others):
            return None
        is_aligned = content.data_ptr() % spec.torch_dtype.itemsize == 0
        flat = elements(content if is_aligned else content.clone(), spec.torch_dtype)
        measurement.add(flat.view((end - begin) // row, -1))
    for stream in streams:
        stream.finish()
    return measurement.result()


def common_groups(left: Checkpoint, right: Checkpoint | None) -> Iterator[tuple[str, ...]]:
    """Groups of `left`, joined where `right` must be read together, in the order of `left`."""
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
            joined = {index: home if place == other else place for index, place in joined.items()}
        merged[home] += names
        joined.update(dict.fromkeys(touched, home))
    yield from (tuple(names) for names in merged if names)


@contextmanager
def threads(largest: int, spare: int = 0) -> Iterator[Executor]:
    """A thread a core, memory permitting, each with one thread of torch's: more would only be in their way.

    `largest`: bytes of the largest group of tensors on one side; `spare`: threads more, where they wait for a disk.
    """
    import torch

    before = torch.get_num_threads()
    try:
        # Both sides and what is computed from them are in memory at a time, for every thread.
        workers = max(1, min(cores() + spare, _MEMORY // (3 * largest or 1)))
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)
