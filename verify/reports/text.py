"""What the formats for people share: findings by code, and how many of them are shown."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.core.progress import size
from ckptkit.core.specs import ranges
from verify.evidence.folding import layers_of
from verify.report import Finding, Report, anchors

# How what should be and what is begin alike: `rms_norm_eps = `.
_SAME_START = re.compile(r"(\w[\w. ]*? = |shape (?=\[)|(?=\[)).*\n\1", re.DOTALL)
_UNDIVIDED = re.compile(r"(?P<what>[\w' ]+?) that (?P<rest>divides? (?:by|over) .+)", re.DOTALL)
_MULTIPLE = re.compile(r"a multiple of [^(]+")
_SUBJECTLESS = re.compile(r"(?:none|nothing|neither|missing|not|it|its|they)\b")


@dataclass(frozen=True)
class Group:
    """The findings of one code and severity. Of many only the first are shown; `more` says how many are not."""

    code: str
    title: str
    severity: str
    shown: Sequence[tuple[str, Finding]]
    more: int


def groups(report: Report, limit: int) -> list[Group]:
    """All findings with their anchors by code, errors first; at most `limit` shown of each.

    Those that another finding explains come last.
    """
    found: dict[tuple[bool, str, str], list[tuple[str, Finding]]] = defaultdict(list)
    for anchor, finding in zip(anchors(report.findings), report.findings, strict=True):
        found[finding.cause is not None, finding.severity, finding.code].append((anchor, finding))
    titles = {check.code: check.title for check in report.checks}
    ordered = sorted(found.items(), key=lambda item: (item[0][0], item[0][1] != "error"))
    return [
        Group(code, titles.get(code, ""), severity, group[:limit], max(0, len(group) - limit))
        for (_, severity, code), group in ordered
    ]


def rest(group: Group) -> str:
    """What to say of the findings that are not shown."""
    return f"and {group.more} more {group.code} findings, all of them in the JSON report (--report FILE.json)"


def subject_of(finding: Finding) -> str:
    """What the finding is about: the tensors, with their number; else the file; else nothing."""
    if finding.tensor:
        return finding.tensor + (f" ({finding.count} tensors)" if finding.count > 1 else "")
    return finding.file or ""


def duration(seconds: float) -> str:
    """A time as people read it: `0.4 s`, `2 min 12 s`, `1 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def totals(report: Report) -> str:
    """How many checks there were and how they ended, and how much was compared."""
    counts = report.to_json()["counts"]
    ended = (
        f"{counts['checks']} checks: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    )
    return f"{ended}; {counts['tensors_compared']} comparisons, {size(counts['bytes_compared'])}"


def wrong_of(expected: str, actual: str) -> str:
    """What is wrong, and instead of what where the actual value says little by itself."""
    if match := _SAME_START.match(f"{expected}\n{actual}"):
        return f"{actual} instead of {expected.removeprefix(match[1])}"
    if match := _UNDIVIDED.fullmatch(expected):
        what = actual if actual.startswith(f"{match['what']} = ") else match["what"]
        verb = "does not" if " = " in what or match["rest"].startswith("divides") else "do not"
        return f"{what} {verb} {match['rest'].replace('divides', 'divide', 1)}"
    if match := _MULTIPLE.match(expected):
        return f"{actual}, not {match[0].rstrip()}"
    return actual


def has_no_subject(wrong: str) -> bool:
    """Whether words for what is wrong do not name what they are about, such as `none: ...` or `it is not there`."""
    return _SUBJECTLESS.match(wrong) is not None


def said_of(finding: Finding) -> str:
    """A finding in one line: what it is about, and what is wrong; of several kinds only how many, where."""
    if finding.tensor and ", " in finding.tensor:
        layers = [] if "layer" in finding.actual else layers_of(finding.names)
        where = f"layer{'s' * (len(layers) > 1)} {ranges(layers).strip('{}')}, " if layers else ""
        return f"{finding.actual} ({where}{finding.count} tensors)"
    wrong = wrong_of(finding.expected, finding.actual)
    about = subject_of(finding) or (finding.expected if has_no_subject(wrong) else "")
    return f"{about}: {wrong}" if about else wrong
