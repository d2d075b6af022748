"""What is asked of a scheme for one checkpoint, and the error that it reports. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.quant.ignore.readers import ALL_READERS


@dataclass(frozen=True)
class Request:
    """What is asked for one checkpoint beside the scheme."""

    # The source as messages name it.
    where: str
    # A quantized checkpoint of the same model: what it has packed is packed, with its scales where they still fit.
    like: Checkpoint | None = None
    # The source as it is stored, where it is quantized itself; used as `like` is, less what `ignore` names.
    stored: Checkpoint | None = None
    # "rl" packs routed experts alone, which both SGLang and vLLM can be updated with.
    preset: Literal["rl"] | None = None
    # Those of `ckptkit.quant.ignore.readers.ALL_READERS` who must agree on what is packed.
    readers: Sequence[str] = ALL_READERS
    # A tensor parallel size that the kernels of SGLang must be able to load.
    tp: int | None = None
    # What quantizes, "cpu" or "cuda"; the bytes are the same.
    device: str = "cpu"


class SquaredError(NamedTuple):
    """Sums over weights: the squares of what packing changed, and those of the weights themselves."""

    error: float
    weights: float

    @classmethod
    def total(cls, parts: Iterable[SquaredError]) -> SquaredError:
        """The sums over several matrices."""
        found = list(parts)
        return cls(sum(one.error for one in found), sum(one.weights for one in found))

    @property
    def relative(self) -> float | None:
        """The Frobenius norm of the change, as a share of that of the weights; 0 where all are zeros.

        None where a square is beyond float32: of weights of more than 1e19.
        """
        if not math.isfinite(self.error + self.weights):
            return None
        return math.sqrt(self.error / self.weights) if self.weights else 0.0
