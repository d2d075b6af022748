"""Tensor specs (name, shape, dtype), parallel sizes, and folded names for messages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.core.dtypes import ITEMSIZE, dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch

MAX_NAME = 4096  # characters of a tensor's name; in real models, fewer than 200
MAX_AXES = 64  # of a tensor in a file, like in torch; the product of a million sizes would take hours


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, shape and dtype, a name such as `bfloat16` (`ckptkit.core.dtypes`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """The spec of `tensor`, under this name."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype))

    @property
    def nbytes(self) -> int:
        """Size in bytes if stored densely."""
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
    """Describes the longest of these names if it is longer than MAX_NAME, else None."""
    name = max(names, key=len, default="")
    if len(name) <= MAX_NAME:
        return None
    return f"a tensor name of {len(name)} characters that starts with {name[:40]!r}, but at most {MAX_NAME} are read"


def fold(names: Iterable[str]) -> list[str]:
    """Combines names that differ only in layer and expert numbers: `model.layers.{0..47}.mlp.gate.weight`.

    Numbers in one position become a list of ranges. Two positions are folded only if every combination occurs, so that
    a folded name contains no other names.
    """
    groups: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        # A regular expression takes twice as long, and releases have 200,000 names.
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
    # The last number is folded within each prefix; prefixes with equal last numbers are folded together.
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
    """`{0..3,7}` for 0 1 2 3 7; a single number has no braces."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ",".join("..".join(map(str, run)) for run in runs)
    return text if text.isdecimal() else f"{{{text}}}"


def summarize(names: Iterable[str], limit: int = 5) -> str:
    """Folded names for a message, at most `limit` of them, and the number of further ones."""
    folded = fold(names)
    rest = len(folded) - limit
    return ", ".join(folded[:limit]) + (f" and {rest} more" if rest > 0 else "")
