"""The report as one HTML page that needs nothing else: no network, no fonts, and no script but for the filter."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from ckptkit.core.printable import printable
from verify.check import all_checks
from verify.report import SCHEMA, Finding, Report, anchors
from verify.reports.headline import alike, cause_of, headline, other_reasons
from verify.reports.layer_map import layer_map
from verify.reports.stages import stages
from verify.reports.text import duration, subject_of, totals

_SHOWN = 50  # causes
_LISTED = 20  # findings below one


@dataclass(frozen=True)
class Cause:
    """Findings that say the same, by the first of them, and those that follow from them; with their anchors.

    `text` is what is wrong in words. Of many findings the first are listed; `more` says how many are not.
    """

    anchor: str
    finding: Finding
    title: str
    text: str
    same: Sequence[tuple[str, Finding]]
    follows: Sequence[tuple[str, str, str]]
    more: int


def html(report: Report) -> str:
    """The page: the cause, the stages, the map of layers, findings with fix and cause, facts, checks.

    Its content security policy lets no script or style run but its own.
    """
    from jinja2 import Environment, StrictUndefined  # only this format needs it

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_printable, trim_blocks=True, lstrip_blocks=True
    )
    style, script, found = _asset("page.css"), _asset("page.js"), causes(report)
    targets = _targets(report, found)
    return environment.from_string(_asset("page.html")).render(
        report=report,
        schema=SCHEMA,
        headline=headline(report),
        reasons=other_reasons(report),
        totals=totals(report),
        seconds=sum(check.seconds for check in report.checks),
        stages=stages(report),
        map=layer_map(report.heat, targets),
        causes=found[:_SHOWN],
        more=len(found) - _SHOWN,
        codes={check.code: targets[anchor] for check in report.checks if (anchor := f"{check.code}-1") in targets},
        rationales={check.code: check.rationale for check in all_checks()},
        subject_of=subject_of,
        duration=duration,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def causes(report: Report) -> list[Cause]:
    """What is wrong, errors first: findings that say the same together, and below each what follows from it."""
    named = dict(zip(anchors(report.findings), report.findings, strict=True))
    anchor_of = {id(one): anchor for anchor, one in named.items()}
    titles = {check.code: check.title for check in report.checks}
    roots = sorted((one for one in named.values() if one.cause is None), key=lambda one: one.severity != "error")
    found = []
    for group in alike(roots):
        same = [(anchor_of[id(one)], one) for one in group]
        own = {anchor for anchor, _ in same}
        follows = [(anchor, one) for anchor, one in named.items() if one.cause in own]
        words = [(anchor, cause_of([one], report.checkpoint), titles.get(one.code, "")) for anchor, one in follows]
        more = max(0, len(same) - _LISTED) + max(0, len(words) - _LISTED)
        text, title = cause_of(group, report.checkpoint), titles.get(group[0].code, "")
        found.append(Cause(same[0][0], group[0], title, text, same[:_LISTED], words[:_LISTED], more))
    return found


def _targets(report: Report, found: Sequence[Cause]) -> dict[str, str]:
    """Where a link to a finding leads, by anchor: to itself, to its cause, or to where the rest is counted."""
    shown = {anchor for cause in found[:_SHOWN] for anchor, _ in cause.same}
    shown |= {anchor for cause in found[:_SHOWN] for anchor, _, _ in cause.follows}
    homes = {anchor: cause.anchor for cause in found[:_SHOWN] for anchor, _ in cause.same}
    targets = {}
    for anchor, one in zip(anchors(report.findings), report.findings, strict=True):
        home = homes.get(one.cause or anchor, "more-findings")
        targets[anchor] = anchor if anchor in shown else home
    return targets


def _printable(value: object) -> object:
    """What stands in the place of `value`: its printable text, unless it is markup already."""
    return value if hasattr(value, "__html__") else printable(str(value))


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
