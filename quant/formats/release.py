"""Describes a quantized release by its headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

DAMAGED = "download or copy this file again; if it is as released, the release is broken"


@dataclass(frozen=True)
class Release:
    """The tensors of a quantized checkpoint at `where`, and the file of each as far as files are known."""

    where: str
    specs: Mapping[str, TensorSpec]
    files: Mapping[str, Path]

    @classmethod
    def of(cls, source: Checkpoint, where: str) -> Release:
        """Describes `source` by its headers."""
        shards = source.shards.values() if isinstance(source, HfCheckpoint) else []
        return cls(where, source.specs, {name: shard.path for shard in shards for name in shard.specs})

    def home(self, name: str) -> str:
        """Returns the file that holds a tensor, or `where` when it is not known."""
        return str(self.files.get(name, self.where))

    def refused(self, name: str, why: str, hint: str) -> CkptkitError:
        """Returns an error that names a tensor, its shape and dtype, and its file."""
        return CkptkitError(f"{self.home(name)}: {self.specs.get(name, name)} {why}", hint)

    def require(self, name: str, beside: str) -> TensorSpec:
        """Returns the tensor `name`, which `beside` needs. Raises CkptkitError when it is missing."""
        if name not in self.specs:
            raise self.refused(
                beside,
                f"has no {name} beside it",
                "a shard is missing or stale: compare the names with the release's index",
            )
        return self.specs[name]

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], *why: object) -> None:
        """Raises CkptkitError unless a tensor has this shape and one of these dtypes; `why`: what implies them."""
        spec = self.specs[name]
        if spec.shape != shape or spec.dtype not in dtypes:
            reason = f"must be {list(shape)} {' or '.join(dtypes)}, by {' and '.join(map(str, why))}"
            raise self.refused(
                name, reason, "config.json belongs to other weights, or the shard is wrong: restore both"
            )

    def check_finite(self, name: str, values: Tensor) -> None:
        """Raises CkptkitError for NaN or infinity in `values`, the largest that this tensor can produce."""
        if not bool(values.isfinite().all()):
            raise self.refused(name, "gives NaN or infinity", DAMAGED)
