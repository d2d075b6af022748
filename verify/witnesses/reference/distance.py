"""Distances of an engine's log-probabilities from a reference's, and of the noise of its format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.verify.witnesses.reference.job import Judged


@dataclass(frozen=True)
class Distance:
    """Of answers to the same prompts, all positions together; log-probabilities are natural logarithms."""

    mean: float  # of the absolute differences for the prompts' own tokens
    largest: float  # of the same
    # The mean Kullback-Leibler divergence from the first to the second, over the first's TOP tokens and one event for
    # all remaining ones, so a lower bound of the divergence over the vocabulary.
    divergence: float
    overlap: float  # the mean share of the second's best tokens among the first's
    parted: tuple[int, int] | None  # prompt and position of the first token for which their best tokens differ

    def __str__(self) -> str:
        best = "the same best token at all positions"
        if self.parted:
            best = f"different best tokens, first at token {self.parted[1]} of prompt {self.parted[0]}"
        gap = f"mean {self.mean:.4f}, largest {self.largest:.3f}"
        return f"{gap}; KL {self.divergence:.2g}; top tokens shared {self.overlap:.1%}; {best}"


def distance(one: Sequence[Judged], other: Sequence[Judged]) -> Distance:
    """`other` has in `top` the log-probabilities of the tokens in `top_ids` of `one`."""
    gaps = _gaps(one, other)
    divergences = np.concatenate([_divergence(a, b) for a, b in zip(one, other, strict=True)])
    tops = [
        (number, position, mine, theirs)
        for number, (a, b) in enumerate(zip(one, other, strict=True))
        for position, (mine, theirs) in enumerate(zip(a.top_ids, b.top_ids, strict=True), start=1)
    ]
    shared = [len({*mine} & {*theirs}) / len(theirs) for *_, mine, theirs in tops]
    differences = ((number, position) for number, position, mine, theirs in tops if mine[0] != theirs[0])
    means = float(divergences.mean()), float(np.mean(shared))
    return Distance(float(gaps.mean()), float(gaps.max()), *means, next(differences, None))


def mean_gap(one: Sequence[Judged], other: Sequence[Judged]) -> float:
    """The mean of the absolute differences for the prompts' own tokens."""
    return float(_gaps(one, other).mean())


def _gaps(one: Sequence[Judged], other: Sequence[Judged]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([np.abs(np.subtract(a.tokens, b.tokens)) for a, b in zip(one, other, strict=True)])


def _divergence(one: Judged, other: Judged) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """By position; probabilities of tokens outside `top` are added up."""
    mine, theirs = np.array(one.top, np.float64), np.array(other.top, np.float64)
    rest, their_rest = (np.clip(1 - np.exp(part).sum(1), 1e-12, None) for part in (mine, theirs))
    return np.asarray((np.exp(mine) * (mine - theirs)).sum(1) + rest * np.log(rest / their_rest))


def not_finite_logprobs(answers: Sequence[Judged]) -> tuple[int, int]:
    """The number of log-probabilities of prompts' tokens that are not finite, and of all of them."""
    values = [value for answer in answers for value in answer.tokens]
    return sum(not math.isfinite(value) for value in values), len(values)


def best_tokens(answers: Sequence[Judged]) -> int:
    """The number of different tokens that are the most probable one somewhere."""
    return len({ids[0] for answer in answers for ids in answer.top_ids})
