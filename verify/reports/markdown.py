"""The report as Markdown (GitHub's), for a pull request, an issue or a job summary."""

from __future__ import annotations

import re

from ckptkit.core.printable import printable
from ckptkit.verify.core.report import Finding, Report
from ckptkit.verify.reports.text import groups, headline, named_subject, other_reasons, rest, totals

_SHOWN = 20  # findings of one code


def markdown(report: Report) -> str:
    """The cause in a sentence; findings, the worst first; their details; facts and checks; the verdict."""
    source = f" against {code(report.source)}" if report.source else ""
    verdict = escaped(report.verdict)
    lines = [f"# ckptkit: {verdict}", "", f"**{escaped(headline(report))}**", ""]
    lines += [f"{code(report.checkpoint)}{source}", "", *body(report)]
    about = [escaped(text) for text in (report.model, report.date) if text]
    made = f"Made by ckptkit {escaped(report.version)} with {code(' '.join(report.command))}"
    lines += [f"{' · '.join([*about, made])}.", "", f"**{verdict}**"]
    return "\n".join(lines) + "\n"


def body(report: Report) -> list[str]:
    """The lines of findings, facts and checks."""
    shown = groups(report, _SHOWN)
    lines = [f"- not looked at: {escaped(reason)}" for reason in other_reasons(report)]
    lines += [""] if lines else []
    for severity, anchor, one in ((group.severity, *found) for group in shown for found in group.shown):
        about, follows = named_subject(one), f" (follows from {one.cause})" if one.cause else ""
        lines.append(f"- {severity} **{anchor}** {code(about) + ': ' if about else ''}{escaped(one.actual)}{follows}")
    lines += [""] if shown else []
    for group in shown:
        lines += [f"## {group.code} {group.severity}: {escaped(group.title)}", ""]
        lines += [line for anchor, finding in group.shown for line in _finding(anchor, finding)]
        lines += [f"- … {rest(group)}", ""] if group.more else [""]
    for name, facts in report.facts.items():
        lines += [f"## {escaped(name)}", "", *(f"- {escaped(fact)}" for fact in facts), ""]
    lines += ["<details>", f"<summary>{totals(report)}</summary>", ""]
    lines += ["| code | check | status | compared | seconds |", "| --- | --- | --- | ---: | ---: |"]
    for check in report.checks:
        title = escaped(check.title if check.reason is None else f"{check.title} ({check.reason})")
        compared = f"{check.tensors_compared} | {check.seconds:.1f}"
        lines.append(f"| {check.code} | {title} | {check.status} | {compared} |")
    return [*lines, "", "</details>", ""]


def _finding(anchor: str, finding: Finding) -> list[str]:
    subject = finding.tensor or finding.file
    count = f" ({finding.count} tensors)" if finding.count > 1 else ""
    lines = [f"- **{anchor}** {code(subject) if subject else ''}{count}".rstrip()]
    lines += [f"  - file: {code(finding.file)}"] if finding.file and finding.tensor else []
    lines += [f"  - rank: {escaped(finding.rank)}"] if finding.rank else []
    values = {"expected": finding.expected, "actual": finding.actual, "next": finding.hint}
    return lines + [f"  - {label}: {escaped(text)}" for label, text in values.items()]


def escaped(text: str) -> str:
    """The text on one line, with special characters of Markdown and HTML escaped."""
    return re.sub(r"([\\`*_\[\]<>|#&~$!])", r"\\\1", printable(text))


def code(text: str) -> str:
    """A code span, fenced by enough backticks."""
    content = printable(text)
    fence = "`" * (max((len(run) for run in re.findall("`+", content)), default=0) + 1)
    pad = " " if "`" in content or content != content.strip() else ""
    return f"{fence}{pad}{content}{pad}{fence}"
