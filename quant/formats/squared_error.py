"""How far packed weights are from the weights that they were made of, as sums that add up over matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


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
