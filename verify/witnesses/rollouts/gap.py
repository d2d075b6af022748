"""How far recorded log-probabilities are from recomputed ones, in nats a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Lists = Sequence[Sequence[float]]
Masks = Sequence[Sequence[bool]]
Array = np.ndarray[tuple[int], np.dtype[np.float64]]
_MAX_EXPONENT = 700.0  # exp of more overflows float64


@dataclass(frozen=True)
class Gap:
    """Over `tokens` tokens: mean and largest absolute difference, and two estimates of the Kullback-Leibler divergence.

    Of log-probabilities p that tokens were sampled by and others q, k1 is the mean of p - q, which may be negative, and
    k3 the mean of exp(q - p) - 1 - (q - p). Source: John Schulman, "Approximating KL Divergence",
    http://joschu.net/blog/kl-approx.html.
    """

    tokens: int
    mean: float
    largest: float
    k1: float
    k3: float

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.4f} nats a token, largest {self.largest:.3f}; KL {self.k3:.2g} (k3), {self.k1:.2g} (k1)"
        )


def gap(sampled: Lists, other: Lists, masks: Masks) -> Gap:
    """Between lists of log-probabilities, where the masks, of which some must be set, say so."""
    pairs = [_masked(p, q, mask) for p, q, mask in zip(sampled, other, masks, strict=True)]
    p, q = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    ratio = np.minimum(q - p, _MAX_EXPONENT)
    return Gap(
        p.size,
        float(np.abs(p - q).mean()),
        float(np.abs(p - q).max()),
        float((p - q).mean()),
        float((np.expm1(ratio) - ratio).mean()),
    )


def mean(values: Lists, masks: Masks) -> float:
    """The mean of what the masks choose, which must be something."""
    return float(
        np.concatenate(
            [np.asarray(one)[np.asarray(mask, bool)] for one, mask in zip(values, masks, strict=True)]
        ).mean()
    )


def neighbours(sampled: Lists, other: Lists, masks: Masks) -> Iterator[tuple[int, Gap]]:
    """The gaps to the log-probabilities of the previous token (-1) and of the next one (1), where there are any."""
    for offset in (-1, 1):
        early, late = slice(0, -1), slice(1, None)
        mine, theirs = (late, early) if offset < 0 else (early, late)
        both = [[a and b for a, b in zip(mask[mine], mask[theirs], strict=True)] for mask in masks]
        if any(map(any, both)):
            yield offset, gap([one[mine] for one in sampled], [one[theirs] for one in other], both)


def _masked(p: Sequence[float], q: Sequence[float], mask: Sequence[bool]) -> tuple[Array, Array]:
    chosen = np.asarray(mask, bool)
    return np.asarray(p, np.float64)[chosen], np.asarray(q, np.float64)[chosen]
