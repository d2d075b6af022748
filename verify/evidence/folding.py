"""Many tensors with the same trouble as few findings, with layer and expert numbers folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ckptkit.core.specs import ranges, summarize

LAYER = re.compile(r"(?:model\.|language_model\.|decoder\.)+layers\.(\d+)\.")
# Multi-token prediction layers that are not numbered on from the last decoder layer: Megatron and Qwen, MiMo.
MTP_LAYER = re.compile(r"(?:mtp\.|model\.mtp_)layers\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def by_pattern(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Names that differ only in layer and expert numbers: folded for people, and one by one."""
    for group in alike(names):
        yield summarize(group), group


def alike(names: Iterable[str]) -> Iterable[list[str]]:
    """The same groups without their text, which takes longer than to find them."""
    groups: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}  # of modules, since a packed weight has three names or more
    for name in names:
        module, dot, leaf = name.rpartition(".")
        if (kind := kinds.get(module)) is None:
            kind = kinds[module] = _NUMBER.sub("#", module)
        groups.setdefault(f"{kind}.#" if dot and leaf.isdecimal() else f"{kind}.{leaf}", []).append(name)
    return groups.values()


def chunk_ranges(chunks: Sequence[Sequence[int]]) -> str:
    """The layers of a pipeline stage, chunk by chunk: `0..1 and 4..5`; `none` for a chunk without layers."""
    return " and ".join(ranges(chunk).strip("{}") if chunk else "none" for chunk in chunks)
