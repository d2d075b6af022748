"""A quantized release before a byte of it is read, and what every format of one has to say about itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Step
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

DAMAGED = "download or copy this file again; if it is as released, the release is broken"


@dataclass(frozen=True)
class Release:
    """The tensors of a quantized checkpoint at `where`, and the file of each where files are known."""

    where: str
    specs: Mapping[str, TensorSpec]
    files: Mapping[str, Path]

    @classmethod
    def of(cls, source: Checkpoint, where: str) -> Release:
        """What the headers of `source` tell."""
        shards = source.shards.values() if isinstance(source, HfCheckpoint) else []
        return cls(where, source.specs, {name: shard.path for shard in shards for name in shard.specs})

    def home(self, name: str) -> str:
        """The file that holds a tensor."""
        return str(self.files.get(name, self.where))

    def refused(self, name: str, why: str, hint: str) -> CkptkitError:
        """The error that names a tensor, with its shape and dtype, and its file."""
        return CkptkitError(f"{self.home(name)}: {self.specs.get(name, name)} {why}", hint)

    def require(self, name: str, beside: str) -> TensorSpec:
        """The tensor that must stand beside another. Raises CkptkitError when it does not."""
        if name not in self.specs:
            raise self.refused(
                beside,
                f"has no {name} beside it",
                "a shard is missing or stale: compare the names with the release's index",
            )
        return self.specs[name]

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], *why: object) -> None:
        """Raises CkptkitError unless a tensor has this shape and one of these dtypes; `why` is what they follow from."""
        spec = self.specs[name]
        if spec.shape != shape or spec.dtype not in dtypes:
            reason = f"must be {list(shape)} {' or '.join(dtypes)}, by {' and '.join(map(str, why))}"
            raise self.refused(
                name, reason, "config.json belongs to other weights, or the shard is wrong: restore both"
            )

    def check_finite(self, name: str, values: Tensor) -> None:
        """Raises CkptkitError when `values`, the largest that can be made with this tensor, hold NaN or infinity."""
        if not bool(values.isfinite().all()):
            raise self.refused(name, "gives NaN or infinity", DAMAGED)


class Format(Protocol):
    """How a release stores its quantized weights."""

    @property
    def words(self) -> str:
        """The format in a few words, for people."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Endings of names that mean something only beside a quantized weight."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Endings of names that say how activations are quantized, which plain weights have no use for."""

    def steps(self, release: Release) -> Iterator[Step]:
        """A step for each quantized weight, its main tensor the first input. Raises CkptkitError for parts that do not fit."""
