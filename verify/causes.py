"""Folds findings that have one cause: a zero router is also a difference from the source, and a dead router."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from verify.evidence.folding import layers_of
from verify.report import Finding, anchors

_PACKED_PART = re.compile(r"\.weight_\w+$")


def with_causes(findings: Sequence[Finding], explained_by: Mapping[str, Sequence[str]]) -> list[Finding]:
    """The findings, each with its `cause`: the first, as bad or worse, that half of its tensors are in.

    `explained_by`: whose findings may be the cause of a check's, by code. A cause has none itself.
    """
    by_anchor = dict(zip(anchors(findings), findings, strict=True))
    weights = {anchor: frozenset(map(_weight, one.names)) for anchor, one in by_anchor.items()}
    causes: dict[str, str] = {}

    def root(anchor: str) -> str:
        return root(causes[anchor]) if anchor in causes else anchor

    for anchor, finding in by_anchor.items():
        for code in explained_by.get(finding.code, ()):
            for other, candidate in by_anchor.items():
                if (
                    candidate.code == code
                    and anchor not in causes
                    and root(other) != anchor
                    and candidate.severity in ("error", finding.severity)
                    and (_covers(weights[other], weights[anchor]) or _same_move(candidate, finding))
                ):
                    causes[anchor] = other
    return [replace(finding, cause=root(anchor) if anchor in causes else None) for anchor, finding in by_anchor.items()]


def _weight(name: str) -> str:
    """A packed weight by the name of the plain one, under which other checks know it."""
    return _PACKED_PART.sub(".weight", name)


def _covers(explained: Collection[str], names: frozenset[str]) -> bool:
    return bool(names) and 2 * len(names.intersection(explained)) >= len(names)


def _same_move(one: Finding, other: Finding) -> bool:
    """Whether both say the same of the same layers, whose tensors a program may know by other names."""
    layers = layers_of(one.names)
    return bool(layers) and one.actual == other.actual and layers == layers_of(other.names)
