"""Many tensors with the same trouble as few findings, with layer and expert numbers folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptkit.specs import summarize

LAYER = re.compile(r"(?:model\.|language_model\.|decoder\.)+layers\.(\d+)\.")
# Multi-token prediction layers that are not numbered on from the last decoder layer: Megatron and Qwen, MiMo.
MTP_LAYER = re.compile(r"(?:mtp\.|model\.mtp_)layers\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def by_pattern(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Names that differ only in layer and expert numbers: folded for people, and one by one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name), []).append(name)
    for group in groups.values():
        yield summarize(group), group
