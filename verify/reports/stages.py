"""The strip of a report: what a checkpoint was held against, stage by stage, how that ended, and what was not asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verify.check import LOOKS_AT, WITNESSES, all_checks
from verify.report import CheckResult, Finding, Report
from verify.reports.text import duration

_CODE = re.compile(r"CK\d{3}")
_OPTIONS = {"source": "--source", **{name.lower(): option for name, option in WITNESSES.items()}}
_OPTIONS["engine"] = "verify --engine"  # of the reports of preflight, which has no such option
_SHOWN_S = 0.1
_NOT_ASKED = {"source": "not given", "weights": "not compared", "some weights": "not compared"}


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
            found.append(_looked_at(name, checks, [one for one in report.findings if one.code in codes], report))
    seen = {stage.name.lower() for stage in found}
    left = [_not_asked(name) for name in report.not_asked if name.lower() not in seen]
    places = ["Source", *order]
    return sorted((*found, *left), key=lambda one: places.index(one.name) if one.name in places else len(places))


def _name(stage: str) -> str:
    text = "quantization" if stage == "quantization" else LOOKS_AT[stage]
    return text[0].upper() + text[1:] if text != "vLLM" else text


def _not_asked(name: str) -> Stage:
    shown = name if name == "vLLM" else name[0].upper() + name[1:]
    return Stage(shown, "unasked", _NOT_ASKED.get(name, "not asked"), _OPTIONS.get(name.lower(), ""))


def _looked_at(name: str, checks: Sequence[CheckResult], findings: Sequence[Finding], report: Report) -> Stage:
    style, outcome = next(_outcomes(checks, findings, report))
    count, seconds = f"{len(checks)} check{'s' * (len(checks) > 1)}", sum(check.seconds for check in checks)
    return Stage(name, style, outcome, f"{count}, {duration(seconds)}" if seconds >= _SHOWN_S else count)


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
