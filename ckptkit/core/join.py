"""Two checkpoints seen as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.extents import Extent, Place
from ckptkit.core.plan import extents_of, passes, places_of
from ckptkit.core.specs import TensorSpec, summarize


class Joined:
    """The tensors of two checkpoints, with the config of the first. Raises CkptkitError when both hold one of the same name."""

    def __init__(self, first: Checkpoint, second: Checkpoint) -> None:
        if both := sorted(first.specs.keys() & second.specs.keys()):
            raise CkptkitError(
                f"two checkpoints to join both hold {summarize(both)}", "name the right HF directory with --hf"
            )
        self._parts = (first, second)

    @property
    def config(self) -> Mapping[str, Any]:
        return self._parts[0].config

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {**self._parts[0].specs, **self._parts[1].specs}

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        return [*self._parts[0].groups, *self._parts[1].groups]

    def places(self, names: Iterable[str]) -> Iterator[Place]:
        """As of those that hold them."""
        names = list(names)
        for part in self._parts:
            yield from places_of(part, [name for name in names if name in part.specs])

    def extents(self, name: str) -> Sequence[Extent] | None:
        """As of the one that holds it."""
        return next(extents_of(part, name) for part in self._parts if name in part.specs)

    def in_order(self, name: str) -> bool:
        """As of the one that holds it."""
        return next(passes(part, name) for part in self._parts if name in part.specs)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self._parts:
            found |= part.read([name for name in names if name in part.specs])
        return found
