"""The protocols for reading and writing checkpoints: Checkpoint and CheckpointWriter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ckptkit.core.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(Protocol):
    """A set of named global tensors: never sharded, never stacked over layers or experts.

    `specs` is in the order of the bytes on disk; reading `groups` in order is the cheapest way to read everything.
    """

    @property
    def config(self) -> Mapping[str, Any]:
        """The HF `config.json` that describes the model."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by name."""

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        """Names to read together, because they share bytes; every name is in exactly one group."""

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors on the CPU, contiguous, in the dtype of their spec."""

    def files_of(self, names: Sequence[str]) -> list[str]:
        """Paths or URLs of the files that contain these tensors, each once. Opens no file."""


class CheckpointWriter(Protocol):
    """Accepts each tensor once, in any order. The final path does not exist before `finish`."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Stores a tensor. Raises CkptkitError if it differs from its spec or is written twice."""

    def finish(self) -> None:
        """Completes the checkpoint. Raises CkptkitError if a tensor is missing."""

    def discard(self) -> None:
        """Removes everything written so far."""
