"""The two protocols that everything else is written against: Checkpoint to read, CheckpointWriter to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ckptkit.core.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(Protocol):
    """A set of named global tensors: never sharded, never stacked over layers or experts.

    `specs` is ordered as the bytes lie on disk; reading `groups` one after the other is the cheapest way through.
    """

    @property
    def config(self) -> Mapping[str, Any]:
        """The HF `config.json` that describes the model."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by name."""

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        """Names to read together, because they come from the same bytes; every name stands in exactly one group."""

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors on the CPU, contiguous, in the dtype of their spec."""

    def files_of(self, names: Sequence[str]) -> list[str]:
        """Paths or URLs of the files that these tensors are read from, each once. Opens none."""


class CheckpointWriter(Protocol):
    """Takes each tensor once, in any order. Nothing is visible under the final path before `finish`."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Stores a tensor. Raises CkptkitError if it is not the announced one or is written twice."""

    def finish(self) -> None:
        """Completes the checkpoint. Raises CkptkitError when a tensor is missing."""

    def discard(self) -> None:
        """Removes everything written so far."""
