"""Formats the findings of every verb as text: one line each, then details, sections, and the verdict."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.core.printable import printable

_LISTED = 20  # listed findings
_DETAILED = 3  # kinds of findings with details
_LABELS = 8  # width of the labels of details
_UNBROKEN = 1 << 20

# A line in two parts; the first may be emphasized.
Line = tuple[str, str]


@dataclass(frozen=True)
class Entry:
    """One finding: its `kind` (a code) and severity, its subject (`about`), the fault (`wrong`), and details.

    `fields` are labels and texts; without them the finding's line is never shortened. `anchor` names the single
    finding, `title` describes its kind.
    """

    kind: str
    severity: str
    about: str
    wrong: str
    fields: Sequence[tuple[str, str]] = ()
    anchor: str = ""
    title: str = ""


@dataclass(frozen=True)
class TextReport:
    """The output of a verb: findings, the worst first, then `sections`, `closing` lines, and the verdict.

    `verdict`: one or two words, and the rest of its line. `more`: how to see the omitted details. `headline`: the first
    sentence.
    """

    entries: Sequence[Entry]
    verdict: Line
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    closing: Sequence[str] = ()
    more: str = ""
    headline: str = ""


def columns() -> int:
    """The width of the terminal, or unlimited for a pipe or a file (for `grep`); COLUMNS overrides both."""
    return shutil.get_terminal_size((_UNBROKEN, 0)).columns


def lay_out(report: TextReport, width: int, every: bool = False) -> Iterator[Line]:
    """Yields the lines of a report, printable, of at most `width` columns if words allow it.

    `every`: all findings with all details; otherwise the first 20, and details of the first one of three kinds.
    """
    for index, block in enumerate(filter(None, map(list, _blocks(report, width, every)))):
        if index:
            yield "", ""
        yield from block


def _blocks(report: TextReport, width: int, every: bool) -> Iterator[Iterable[Line]]:
    listed = report.entries if every else report.entries[:_LISTED]
    widths = [max((len(text) for text in texts), default=0) for texts in zip(*map(_label, listed), strict=True)]
    rest = len(report.entries) - len(listed)
    more = [("", f"and {rest} more finding{'s' * (rest > 1)}")] if rest else []
    yield _wrapped(report.headline, "", "  ", width)
    if not (report.headline and len(report.entries) == 1 and report.entries[0].fields):  # like the headline
        yield [*(line for one in listed for line in _listed(one, widths, width)), *more]
    firsts = {_label(one): one for one in reversed(report.entries)}
    chosen = report.entries if every else [one for one in report.entries if firsts[_label(one)] is one][:_DETAILED]
    chosen = [one for one in chosen if one.fields]
    yield from (detailed(one, width) for one in chosen)
    if left := sum(bool(one.fields) for one in report.entries) - len(chosen):
        yield _wrapped(f"Details of {left} more finding{'s' * (left > 1)}: {report.more}.", "", "", width)
    for name, lines in report.sections.items():
        yield [(f"{printable(name)}:", ""), *(part for line in lines for part in _hanging(line, width))]
    closing = [part for line in report.closing for part in _wrapped(line, "", "  ", width)]
    yield [*closing, (report.verdict[0], printable(report.verdict[1]))]


def plain(lines: Iterator[Line]) -> Iterator[str]:
    """The lines without emphasis and trailing blanks."""
    yield from ((head + tail).rstrip() for head, tail in lines)


def _label(one: Entry) -> tuple[str, str]:
    return one.severity, one.kind


def _listed(one: Entry, widths: Sequence[int], width: int) -> Iterator[Line]:
    head = "  ".join(word.ljust(size) for word, size in zip(_label(one), widths, strict=True))
    label = len(head)
    text = printable(f"{one.about}: {one.wrong}" if one.about else one.wrong)
    if one.fields:
        yield head, f"  {_shortened(text, width - label - 2)}"
        return
    indent = " " * (label + 2)
    first, *rest = _words(text, width, indent, indent) or [""]
    yield head, first[label:]
    yield from (("", line) for line in rest)


def _shortened(text: str, width: int) -> str:
    """The words of `text` that fit; at least one."""
    if len(text) <= width:
        return text
    head, blank, _ = text[: width - 1].rpartition(" ")
    if head.rfind("(") > head.rfind(")"):
        head = head[: head.rfind("(")]
    return f"{head.rstrip(' ,;:')} …" if blank else f"{text.split(' ', 1)[0]} …"


def detailed(one: Entry, width: int) -> Iterator[Line]:
    """Yields the title of a finding and its details."""
    yield f"{one.anchor or one.kind} {one.severity}", f": {printable(one.title)}" if one.title else ""
    for label, text in one.fields:
        yield from _wrapped(text, f"  {label:<{_LABELS}}  ", " " * (_LABELS + 4), width)


def _wrapped(text: str, first: str, rest: str, width: int) -> Iterator[Line]:
    """Wraps a text between words; a name longer than a line is not split."""
    yield from (("", line) for line in _words(text, width, first, rest))


def _hanging(text: str, width: int) -> Iterator[Line]:
    """Wraps a line of a section; continuation lines are indented by two more columns."""
    indent = " " * (2 + len(text) - len(text.lstrip(" ")))
    yield from _wrapped(text.lstrip(" "), indent, f"{indent}  ", width)


def _words(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(width, first, rest, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(printable(text))
