"""The report as one HTML page that needs nothing else: no network, no fonts, and no script but for the filter."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ckptkit.core.printable import printable
from verify.check import LOOKS_AT, WITNESSES, all_checks
from verify.report import NOT_GIVEN, SCHEMA, CheckResult, Finding, Report, anchors
from verify.reports.layer_map import layer_map
from verify.reports.text import alike, cause_of, duration, headline, other_reasons, subject_of, totals

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
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),  # markup stays as it is
        trim_blocks=True,
        lstrip_blocks=True,
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


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


_CODE = re.compile(r"CK\d{3}")
_OPTIONS = {"source": "--source", **{name.lower(): option for name, option in WITNESSES.items()}}
_OPTIONS["engine"] = "verify --engine"  # of the reports of preflight, which has no such option
_SHOWN_S = 0.1


_ORDER = [stage for stage in LOOKS_AT if stage != "quantization"]
_ORDER.insert(_ORDER.index("values") + 1, "quantization")


@dataclass(frozen=True)
class Stage:
    """One box: its name, its CSS class, how it ended, and a detail in a few words."""

    name: str
    style: str
    outcome: str
    detail: str


def stages(report: Report) -> list[Stage]:
    """The boxes in the order in which weights pass: the source, files, values, quantization, programs, behaviour."""
    stage_of = {one.code: _name(one.stage) for one in all_checks()}
    order = list(dict.fromkeys(map(_name, _ORDER)))
    found: list[Stage] = []
    if report.source:
        found.append(Stage("Source", "passed", "given", Path(report.source).name))
    for name in order:
        if checks := [check for check in report.checks if stage_of.get(check.code) == name]:
            codes = {check.code for check in checks}
            style, outcome = next(_outcomes(checks, [one for one in report.findings if one.code in codes], report))
            count, seconds = f"{len(checks)} check{'s' * (len(checks) > 1)}", sum(check.seconds for check in checks)
            detail = f"{count}, {duration(seconds)}" if seconds >= _SHOWN_S else count
            found.append(Stage(name, style, outcome, detail))
    seen = {stage.name.lower() for stage in found}
    left = [
        Stage(_capital(name), "unasked", NOT_GIVEN.get(name, "not asked"), _OPTIONS.get(name.lower(), ""))
        for name in report.not_asked
        if name.lower() not in seen
    ]
    places = ["Source", *order]
    return sorted((*found, *left), key=lambda one: places.index(one.name) if one.name in places else len(places))


def _name(stage: str) -> str:
    return _capital("quantization" if stage == "quantization" else LOOKS_AT[stage])


def _capital(name: str) -> str:
    return name[0].upper() + name[1:] if name != "vLLM" else name


def _outcomes(checks: Sequence[CheckResult], findings: Sequence[Finding], report: Report) -> Iterator[tuple[str, str]]:
    """How it ended, the most important first."""
    own = [one for one in findings if one.cause is None]
    errors = sum(one.severity == "error" for one in own)
    warnings = len(own) - errors
    blocked = {code for reason in report.reasons for code in _CODE.findall(reason.partition(": ")[0])}
    if errors:
        yield "failed", f"✗ {errors} error{'s' * (errors > 1)}"
    if any(check.status == "failed" for check in checks):
        yield "failed", "✗ same cause"
    if any(check.code in blocked for check in checks):
        yield "skipped", "? not known"
    if all(check.status == "skipped" for check in checks):
        yield "skipped", "– not run"
    if warnings:
        yield "warning", f"! {warnings} warning{'s' * (warnings > 1)}"
    yield "passed", "✓ passed"
