"""What the ranks of an engine saw, put together: a tensor is whole where all of it stands on some of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from verify.witnesses.loading.compare import DROPPED, NO_ROUTER
from verify.witnesses.loading.job import LoadReport, Observation
from verify.witnesses.loading.placement import covered
from verify.witnesses.loading.trace import Region

_NUMBER = re.compile(r"[-+]?\d[\d.e+-]*")


_EACH = ("unwritten", "differing", "rounded")  # fields of observations that ranks may share
_NAMES = ("computed", "log", "unchecked")


def merged_reports(reports: Sequence[LoadReport]) -> LoadReport:
    """One report of all ranks, in the order of their numbers; that of a single rank as it is."""
    first = reports[0]
    if len(reports) == 1:
        return first
    found: dict[str, Any] = {name: _grouped([getattr(report, name) for report in reports]) for name in _EACH}
    for name in _NAMES:
        found[name] = tuple(dict.fromkeys(one for report in reports for one in getattr(report, name)))
    wrong = {seen.tensor for seen in found["differing"]}
    rounded = dict.fromkeys(name for report in reports for name in report.requantized)
    routers = _grouped([report.routers for report in reports])  # a rank lacks those of layers that others have
    repacked = [report.repacked for report in reports if report.repacked is not None]
    return replace(
        first,
        **found,
        equal={name: size for report in reports for name, size in report.equal.items() if name not in wrong},
        partial={},
        dropped=tuple(_dropped(reports)),
        routers=tuple(one for one in routers if one.rank is None or not one.what.endswith(NO_ROUTER)),
        repacked=_grouped(repacked) if len(repacked) == len(reports) else None,
        repacked_seen=sum(report.repacked_seen for report in reports),
        requantized={name: max(report.requantized.get(name, 0.0) for report in reports) for name in rounded},
    )


def _grouped(seen: Sequence[Sequence[Observation]]) -> tuple[Observation, ...]:
    """Observations that ranks share but for numbers, once: with the first one's numbers, and its ranks unless all."""
    by_words: dict[tuple[str, str, str], dict[int, Observation]] = defaultdict(dict)
    for rank, several in enumerate(seen):
        for one in several:
            by_words[one.tensor, one.param, _NUMBER.sub("#", one.what)][rank] = one
    return tuple(
        replace(next(iter(by_rank.values())), rank=None if len(by_rank) == len(seen) else ", ".join(map(str, by_rank)))
        for by_rank in by_words.values()
    )


def _dropped(reports: Sequence[LoadReport]) -> Iterator[Observation]:
    """What stands on no rank as a whole, and not on all of them together."""
    dropped = [{seen.tensor: seen for seen in report.dropped} for report in reports]
    for name in dropped[0]:
        if not all(name in others for others in dropped[1:]):
            continue
        seen = [others[name] for others in dropped]
        held = [report.partial[name] for report in reports if name in report.partial]
        if not held:
            yield next((one for one in seen if one.what != DROPPED), seen[0])
            continue
        regions = [Region(offset, tuple(sizes), tuple(steps)) for one in held for offset, sizes, steps in one.parts]
        if (count := covered(held[0].elements, regions)) < held[0].elements:
            yield replace(seen[0], what=f"only {count} of its {held[0].elements} elements were written")
