"""What a tensor is without its bytes (name, shape, dtype), how ranks share it, and how many names are shown as one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.core.dtypes import ITEMSIZE, dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch

MAX_NAME = 4096  # characters of a tensor's name: those of real models have fewer than 200
MAX_AXES = 64  # of a tensor in a file, as torch has it; the product of a million sizes takes hours


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, shape and dtype, a name such as `bfloat16` (`ckptkit.core.dtypes`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """What `tensor` is, under this name."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype))

    @property
    def nbytes(self) -> int:
        """Size in bytes when stored densely."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object. Imports torch."""
        return torch_dtype(self.dtype)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Sizes:
    """Tensor, pipeline and expert parallel sizes; `etp` is the tensor parallel size inside experts."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __str__(self) -> str:
        return f"TP{self.tp} PP{self.pp} EP{self.ep} ETP{self.etp}"


def long_name(names: Iterable[str]) -> str | None:
    """Says which of these names is longer than MAX_NAME, by its beginning; None if none is."""
    name = max(names, key=len, default="")
    if len(name) <= MAX_NAME:
        return None
    return f"a tensor name of {len(name)} characters that begins with {name[:40]!r}, and at most {MAX_NAME} are read"


def fold(names: Iterable[str]) -> list[str]:
    """Names that differ only in layer and expert numbers as one: `model.layers.{0..47}.mlp.gate.weight`.

    Numbers of one position become a list of ranges. Two positions fold only when every combination occurs,
    so a folded name never claims a tensor that is not in `names`.
    """
    groups: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        # Without a regular expression, which takes twice as long: releases have 200,000 names.
        parts, numbers = name.split("."), []
        for index in range(1, len(parts)):
            if parts[index].isdecimal():
                numbers.append(int(parts[index]))
                parts[index] = "{}"
        groups[".".join(parts)].add(tuple(numbers))
    return [text for pattern, numbers in groups.items() for text in _fold_numbers(pattern, numbers)]


def _fold_numbers(pattern: str, numbers: set[tuple[int, ...]]) -> list[str]:
    by_tail: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for heads in numbers:
        if heads:
            by_tail[heads[:-1]].add(heads[-1])
    if not by_tail:
        return [pattern]
    # The last number folds within each prefix; prefixes with equal last numbers fold with one another.
    by_last: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
    for prefix, last in by_tail.items():
        by_last[tuple(sorted(last))].add(prefix)
    folded = []
    for lasts, prefixes in by_last.items():
        position = pattern.rindex("{}")
        tail = ranges(lasts) + pattern[position + 2 :]
        folded += [head + tail for head in _fold_numbers(pattern[:position], prefixes)]
    return folded


def ranges(numbers: Iterable[int]) -> str:
    """`{0..3,7}` for 0 1 2 3 7; a single number stands bare."""
    ordered = sorted(numbers)
    parts: list[str] = []
    start = previous = ordered[0]
    for number in [*ordered[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}..{previous}")
        if number is not None:
            start = previous = number
    return parts[0] if len(ordered) == 1 else "{" + ",".join(parts) + "}"


def summarize(names: Iterable[str], limit: int = 5) -> str:
    """Folded names for a message, at most `limit` of them, with a count of the rest."""
    folded = fold(names)
    rest = len(folded) - limit
    return ", ".join(folded[:limit]) + (f" and {rest} more" if rest > 0 else "")
