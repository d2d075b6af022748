"""Two checkpoints seen as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.extents import ByteRange, Extent, Reader, byte_ranges_of, extents_of, is_streamable, read_with
from ckptkit.core.specs import TensorSpec, summarize

if TYPE_CHECKING:
    from torch import Tensor


class Joined:
    """The tensors of two checkpoints, with the config of the first. Raises CkptkitError when names collide."""

    def __init__(self, first: Checkpoint, second: Checkpoint) -> None:
        if both := sorted(first.specs.keys() & second.specs.keys()):
            raise CkptkitError(
                f"two checkpoints to join both hold {summarize(both)}", "name the right HF directory with --hf"
            )
        self._parts = (first, second)
        self._specs = {**first.specs, **second.specs}

    @property
    def config(self) -> Mapping[str, Any]:
        return self._parts[0].config

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        return [*self._parts[0].groups, *self._parts[1].groups]

    def files_of(self, names: Sequence[str]) -> list[str]:
        found = (part.files_of([name for name in names if name in part.specs]) for part in self._parts)
        return list(dict.fromkeys(itertools.chain.from_iterable(found)))

    def byte_ranges(self, names: Sequence[str]) -> Iterator[ByteRange]:
        """What is read of local files to make these tensors."""
        for part in self._parts:
            yield from byte_ranges_of(part, [name for name in names if name in part.specs])

    def extents(self, name: str) -> Sequence[Extent] | None:
        """Where the bytes of a tensor stand in files, if they do."""
        return next(extents_of(part, name) for part in self._parts if name in part.specs)

    def is_streamable(self, name: str) -> bool:
        """Whether the bytes of a tensor stand in files as they are and in order."""
        return next(is_streamable(part, name) for part in self._parts if name in part.specs)

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self._parts:
            found |= read_with(part, [name for name in names if name in part.specs], reader)
        return found
