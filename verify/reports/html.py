"""The report as one HTML page that needs nothing else: no network, no fonts, and no script but for the filter."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from ckptkit.core.printable import printable
from verify.check import all_checks
from verify.report import SCHEMA, Report
from verify.reports.headline import headline
from verify.reports.heat_table import heat_table
from verify.reports.text import Group, groups, rest, subject_of, totals

_SHOWN = 100  # findings of one code


def html(report: Report) -> str:
    """The page: verdict, findings with fix and cause, heat map, facts, checks.

    Its content security policy lets no script or style run but its own.
    """
    from jinja2 import Environment, StrictUndefined  # only this format needs it

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_printable, trim_blocks=True, lstrip_blocks=True
    )
    style, script, shown = _asset("page.css"), _asset("page.js"), groups(report, _SHOWN)
    targets = _targets(shown)
    return environment.from_string(_asset("page.html")).render(
        report=report,
        schema=SCHEMA,
        headline=headline(report),
        totals=totals(report),
        heat=heat_table(report.heat, targets),
        groups=shown,
        targets=targets,
        causes={check.code: check.rationale for check in all_checks()},
        subject_of=subject_of,
        rest=rest,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _printable(value: object) -> object:
    """What stands in the place of `value`: its printable text, unless it is markup already."""
    return value if hasattr(value, "__html__") else printable(str(value))


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _targets(shown: list[Group]) -> dict[str, str]:
    """Where a link to a finding leads, by anchor, and by code for its first: to it, or to where the rest is counted."""
    targets: dict[str, str] = {}
    for group in shown:
        targets |= {anchor: anchor for anchor, _ in group.shown}
        targets.setdefault(group.code, group.shown[0][0])
        if group.more:
            targets[f"{group.code} more"] = f"{group.code}-{group.severity}-more"
    return targets
