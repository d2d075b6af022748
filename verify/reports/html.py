"""The report as one HTML page that needs nothing else: no network, no fonts, and no script but for the filter."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template

from verify.check import Check, all_checks
from verify.report import SCHEMA, CheckResult, Finding, Report
from verify.reports.heat_table import heat_table
from verify.reports.text import Group, escaped, groups, rest, subject_of, totals

_SHOWN = 100  # findings of one code
_NAME = ' class="name"'


def html(report: Report) -> str:
    """The page: status, heat map, findings with cause and fix, checks, facts. Its policy lets no other script or style run than its own."""
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    shown = groups(report, _SHOWN)
    targets = _targets(shown)
    page = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        schema=SCHEMA,
        title=escaped(f"{report.status}: {report.checkpoint}"),
        status=report.status,
        status_word=report.verdict,
        checkpoint=escaped(report.checkpoint),
        about=_about(report),
        reasons=_reasons(report),
        totals=escaped(totals(report)),
        heat=heat_table(report, targets),
        findings=_findings(shown, {check.code: check for check in all_checks()}),
        checks="\n".join(_check(check, targets) for check in report.checks),
        facts="\n".join(_fact(name, lines) for name, lines in report.facts.items()),
    )


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _targets(shown: list[Group]) -> dict[str, str]:
    """Where a link to a finding leads, by anchor, and by code for its first: to the finding, or where the rest is counted."""
    targets: dict[str, str] = {}
    for group in shown:
        first = group.shown[0][0]
        targets |= {anchor: anchor for anchor, _ in group.shown}
        targets.setdefault(group.code, first)
        if group.more:
            targets[f"{group.code} more"] = f"{group.code}-{group.severity}-more"
    return targets


def _about(report: Report) -> str:
    rows = {"source": report.source, "command": " ".join(report.command), "version": f"ckptkit {report.version}"}
    return "".join(f"<dt>{name}</dt><dd><code>{escaped(value)}</code></dd>" for name, value in rows.items() if value)


def _reasons(report: Report) -> str:
    items = "".join(f"<li>not looked at: {escaped(reason)}</li>" for reason in report.reasons)
    return f"<ul>{items}</ul>" if items else ""


def _findings(shown: list[Group], rules: Mapping[str, Check]) -> str:
    title = '<h2 id="findings-title">Findings</h2>'
    if not shown:
        return f'<section aria-labelledby="findings-title">{title}<p>None.</p></section>'
    head = "".join(f'<th scope="col">{name}</th>' for name in ("finding", "severity", "tensors or file", "actual"))
    body = "\n".join(_group(group, rules.get(group.code)) for group in shown)
    table = f"<table><thead><tr>{head}</tr></thead>\n{body}\n</table>"
    return (
        f'<section aria-labelledby="findings-title">{title}\n{_filter(shown)}\n'
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="findings-title">{table}</div></section>'
    )


def _filter(shown: list[Group]) -> str:
    """Hidden until the script runs, since it does nothing without it."""
    codes, severities = (
        list(dict.fromkeys(values)) for values in ((group.code for group in shown), (group.severity for group in shown))
    )
    return (
        '<form id="filter" hidden><label>text<input type="search" name="text" autocomplete="off"></label>'
        f'{_select("code", codes)}{_select("severity", severities)}<output id="shown" class="quiet"></output></form>'
    )


def _select(name: str, values: Sequence[str]) -> str:
    options = "".join(f"<option>{escaped(value)}</option>" for value in values)
    return f'<label>{name}<select name="{name}"><option value="">all</option>{options}</select></label>'


def _group(group: Group, rule: Check | None) -> str:
    rows = [_finding(group, anchor, finding, rule) for anchor, finding in group.shown]
    if group.more:
        rows.append(
            f'<tbody id="{escaped(group.code)}-{group.severity}-more"><tr><td colspan="4">{escaped(rest(group))}</td></tr></tbody>'
        )
    return "\n".join(rows)


def _finding(group: Group, anchor: str, finding: Finding, rule: Check | None) -> str:
    """Two rows: what in short, and behind it cause and fix. A link to the inner element opens what is round it, without a script."""
    lines = {
        "check": group.title or None,
        "cause": rule.rationale if rule else None,
        "fix": finding.hint,
        "expected": finding.expected,
        "actual": finding.actual,
        "tensors": subject_of(finding) if finding.tensor else None,
        "file": finding.file,
        "rank": finding.rank,
    }
    details = "".join(
        f"<dt>{name}</dt><dd{_NAME if name in ('tensors', 'file') else ''}>{escaped(value)}</dd>"
        for name, value in lines.items()
        if value
    )
    anchor, code = escaped(anchor), escaped(group.code)
    return (
        f'<tbody class="finding" data-code="{code}" data-severity="{group.severity}">'
        f'<tr class="first"><td class="tag"><a href="#{anchor}">{anchor}</a></td><td class="tag"><span class="{group.severity}">{group.severity}</span></td>'
        f'<td class="name">{escaped(subject_of(finding))}</td><td>{escaped(finding.actual)}</td></tr>\n'
        f'<tr class="more"><td colspan="4"><details><summary>cause and fix of {anchor}</summary>'
        f'<dl class="facts" id="{anchor}" tabindex="-1">{details}</dl></details></td></tr></tbody>'
    )


def _check(check: CheckResult, targets: Mapping[str, str]) -> str:
    code = escaped(check.code)
    code = f'<a href="#{escaped(targets[check.code])}">{code}</a>' if check.code in targets else code
    reason = f'<br><span class="quiet">{escaped(check.reason)}</span>' if check.reason else ""
    status = f'<span class="{check.status}">{check.status}</span>'
    numbers = f'<td class="number">{check.tensors_compared}</td><td class="number">{check.seconds:.1f}</td>'
    return f'<tr><td class="tag">{code}</td><td>{escaped(check.title)}{reason}</td><td class="tag">{status}</td>{numbers}</tr>'


def _fact(name: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
    return f"<section><h2>{escaped(name)}</h2><ul>{items}</ul></section>"
