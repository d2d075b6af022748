"""The result of `diff`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from ckptkit.core.specs import TensorSpec, fold
from ckptkit.verify.evidence.compare import TensorDiff
from ckptkit.verify.evidence.folding import group_by_pattern
from ckptkit.verify.evidence.moved import Moved

SCHEMA = "ckptkit-diff/1"
State = Literal["equal", "cast", "differing", "only_a", "only_b", "unread"]
Content = tuple[tuple[int, ...], bytes]  # shape and digest of the bytes, which identify equal content


@dataclass(frozen=True, slots=True)
class Pair:
    """The tensors of both sides under one name."""

    name: str
    a: TensorSpec | None
    b: TensorSpec | None
    content_a: Content | None  # in the narrower of two dtypes
    content_b: Content | None
    state: State
    constant: bool = False  # all elements of a side are equal, so that equal bits under another name prove nothing
    distance: TensorDiff | None = None  # of differing tensors of one shape

    @property
    def nbytes(self) -> int:
        """Bytes that were read for it."""
        return sum(spec.nbytes for spec in (self.a, self.b) if spec)


@dataclass(frozen=True)
class Kind:
    """Differing tensors with names that differ in layer and expert numbers only."""

    names: tuple[str, ...]
    worst: Pair  # with the largest distance
    largest: float
    mean: float
    cosine: float | None
    relative: float


@dataclass(frozen=True)
class Diff:
    """Two checkpoints compared. Each name of either side is in exactly one of the lists."""

    version: str
    a: str
    b: str
    formats: tuple[str, str]
    exact: bool  # whether a cast counts as a difference
    differing: Sequence[Pair]  # on both sides, neither cast nor moved, the worst first
    only_a: Sequence[Pair]
    only_b: Sequence[Pair]
    nbytes: int = 0
    equal: Sequence[str] = ()  # the same bits
    cast: Sequence[Pair] = ()  # equal after a cast to the narrower dtype
    redundant: Sequence[str] = ()  # only on one side, and a repetition, as a tied output layer
    moves: Sequence[Moved] = ()  # bits under another name in B
    notes: Sequence[str] = ()  # on tensors and files that were not compared
    files: Sequence[str] = ()  # differences of config.json and other files that loaders read, a line each
    unread: Sequence[Pair] = ()  # of one shape, and not compared by value without torch

    def __str__(self) -> str:
        """The text that `ckptkit diff` prints; by name, since its module imports this one."""
        return "\n".join(import_module("ckptkit.verify.diff.text").diff_lines(self))

    @property
    def status(self) -> Literal["equal", "different", "inconclusive"]:
        """Whether all tensors and settings are equal; inconclusive if headers are equal and values were not read."""
        cast = (self.cast, self.other_dtypes) if self.exact else ()
        if any((self.files, self.moves, self.differing, self.only_a, self.only_b, *cast)):
            return "different"
        return "inconclusive" if self.unread else "equal"

    @property
    def other_dtypes(self) -> list[Pair]:
        """The pairs of `unread` with two dtypes."""
        return [pair for pair in self.unread if pair.a and pair.b and pair.a.dtype != pair.b.dtype]

    @property
    def counts(self) -> dict[str, int]:
        """The number of tensors of each kind; renamed ones count once."""
        return {
            "equal": len(self.equal),
            "cast": len(self.cast),
            "redundant": len(self.redundant),
            "moved": sum(len(move.names) for move in self.moves),
            "differing": len(self.differing),
            "only_a": len(self.only_a),
            "only_b": len(self.only_b),
            "unread": len(self.unread),
        }

    @property
    def kinds(self) -> list[Kind]:
        """The differing tensors folded, the worst kind first."""
        pairs = {pair.name: pair for pair in self.differing}
        kinds = [_kind([pairs[name] for name in names]) for names in group_by_pattern(pairs)]
        return sorted(kinds, key=lambda kind: (-kind.relative, -kind.largest, kind.names))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON: `ckptkit-diff/1`, which only ever gains keys. Numbers that are not finite are null."""
        return {
            "schema": SCHEMA,
            "version": self.version,
            "a": {"path": self.a, "format": self.formats[0]},
            "b": {"path": self.b, "format": self.formats[1]},
            "status": self.status,
            "exact": self.exact,
            "counts": {**self.counts, "bytes_read": self.nbytes},
            "cast": [_specs(pair) for pair in self.cast],
            "redundant": list(self.redundant),
            "moved": [{"what": move.text, "a": list(move.names), "b": list(move.others)} for move in self.moves],
            "kinds": [
                {
                    "tensors": fold(kind.names),
                    "count": len(kind.names),
                    "max": _finite(kind.largest),
                    "mean": _finite(kind.mean),
                    "cosine": kind.cosine,
                    "relative": _finite(kind.relative),
                    "worst": kind.worst.name,
                }
                for kind in self.kinds
            ],
            "differing": [_specs(pair) | _numbers(pair.distance) for pair in self.differing],
            "only_a": [_specs(pair) for pair in self.only_a],
            "only_b": [_specs(pair) for pair in self.only_b],
            "notes": list(self.notes),
            "files": list(self.files),
        }


def badness(pair: Pair) -> tuple[float, float]:
    """Orders differing tensors: other shapes first, then by the mean difference in standard deviations of A."""
    return (math.inf, math.inf) if pair.distance is None else (pair.distance.relative, pair.distance.largest)


def _kind(pairs: Sequence[Pair]) -> Kind:
    known = [pair.distance for pair in pairs if pair.distance is not None]
    elements = sum(one.elements for one in known)
    return Kind(
        names=tuple(pair.name for pair in pairs),
        worst=max(pairs, key=badness),
        largest=max((one.largest for one in known), default=math.nan),
        mean=sum(one.mean * one.elements for one in known) / elements if elements else math.nan,
        cosine=min((one.cosine for one in known if one.cosine is not None), default=None),
        relative=max(badness(pair)[0] for pair in pairs),
    )


def _specs(pair: Pair) -> dict[str, Any]:
    sides = {"a": pair.a, "b": pair.b}.items()
    return {"name": pair.name} | {side: {"dtype": one.dtype, "shape": list(one.shape)} for side, one in sides if one}


def _numbers(far: TensorDiff | None) -> dict[str, Any]:
    if far is None:
        return {}
    return {
        "elements": far.elements,
        "unequal": far.unequal,
        "not_finite": far.not_finite,
        "max": _finite(far.largest),
        "mean": _finite(far.mean),
        "cosine": far.cosine,
        "std": _finite(far.std),
        "relative": _finite(far.relative),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
