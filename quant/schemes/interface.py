"""The request to a scheme for one checkpoint, and the rounding error that it reports. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.quant.ignore.readers import ALL_READERS


@dataclass(frozen=True)
class Request:
    """The options for one checkpoint in addition to the scheme."""

    where: str  # the name of the source in messages
    # A quantized checkpoint of the same model: its packed weights are packed, with its scales if they still fit.
    like: Checkpoint | None = None
    # The stored tensors of a quantized source, used like `like` but without modules that `ignore` names.
    stored: Checkpoint | None = None
    preset: Literal["rl"] | None = None  # "rl" packs only routed experts, which SGLang and vLLM can update
    readers: Sequence[str] = ALL_READERS  # those that must agree on the packed weights
    tp: int | None = None  # a tensor parallel size that the kernels of SGLang must be able to load
    device: str = "cpu"  # or "cuda", with the same bytes


class SquaredError(NamedTuple):
    """Sums over weights: the squares of the changes by packing, and those of the weights."""

    error: float
    weights: float

    @classmethod
    def total(cls, parts: Iterable[SquaredError]) -> SquaredError:
        """The sums over several matrices."""
        errors = list(parts)
        return cls(sum(one.error for one in errors), sum(one.weights for one in errors))

    @property
    def relative(self) -> float | None:
        """The Frobenius norm of the change relative to the weights, or None if a square exceeds float32."""
        if not math.isfinite(self.error + self.weights):
            return None
        return math.sqrt(self.error / self.weights) if self.weights else 0.0
