"""Groups and folds the names of tensors that differ in layer and expert numbers only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

from ckptkit.core.specs import ranges

K = TypeVar("K")
V = TypeVar("V")
LAYER = re.compile(r"(?:model\.|language_model\.|decoder\.)*layers\.(\d+)\.")
# Multi-token prediction layers with separate numbers: Megatron and Qwen, MiMo, DeepSeek-V4.
MTP_LAYER = re.compile(r"(?:mtp\.layers|model\.mtp_layers|mtp)\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(?:experts\.)?(\d+)\.")  # of a routed expert, in HF and in Megatron
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def layer_of(name: str) -> int | None:
    """The number of the decoder layer of a tensor, or None outside the layers."""
    match = LAYER.match(name)
    return int(match[1]) if match else None


def layers_of(names: Iterable[str]) -> list[int]:
    """The sorted numbers of the layers of these tensors."""
    return sorted({layer for name in names if (layer := layer_of(name)) is not None})


def pattern_of(name: str) -> str:
    """The name with `#` for every number between dots: equal for siblings over layers and experts."""
    return _NUMBER.sub("#", name)


def count_differing_parts(a: str, b: str) -> int:
    """The number of dotted parts that differ between two names."""
    return sum(left != right for left, right in zip_longest(a.split("."), b.split(".")))


def group_by_pattern(names: Iterable[str]) -> Iterable[list[str]]:
    """Groups names that differ in layer and expert numbers only."""
    groups: dict[str, list[str]] = {}
    patterns: dict[str, str] = {}  # of modules, since a packed weight has three names or more
    for name in names:
        module, dot, leaf = name.rpartition(".")
        if (pattern := patterns.get(module)) is None:
            pattern = patterns[module] = pattern_of(module)
        groups.setdefault(f"{pattern}.#" if dot and leaf.isdecimal() else f"{pattern}.{leaf}", []).append(name)
    return groups.values()


def by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, both in order."""
    values: dict[K, list[V]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return values


def chunk_ranges(chunks: Sequence[Sequence[int]]) -> str:
    """The layers of a pipeline stage, chunk by chunk: `0..1 and 4..5`; `none` for a chunk without layers."""
    return " and ".join(ranges(chunk).strip("{}") if chunk else "none" for chunk in chunks)
