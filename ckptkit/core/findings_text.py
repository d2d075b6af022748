"""Lays out findings as text, for every verb: one line each, the details, what else is known, and the verdict last."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.core.printable import printable

_LISTED = 20  # findings with a line of their own
_DETAILED = 3  # kinds of findings with details
_LABELS = 8  # width of the labels of details
_UNBROKEN = 1 << 20

# A line in two parts, of which the first may be emphasized.
Line = tuple[str, str]


@dataclass(frozen=True)
class Entry:
    """One finding: its `kind` (a code) and severity, the thing it is `about`, what is `wrong`, and details.

    `fields` are labels and texts. Without any, the line of the finding holds everything and is never shortened.
    `anchor` names the single finding, `title` what its kind is about.
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

    `verdict`: a word or two, and the rest of its line. `more`: where the rest is. `headline`: a sentence before all.
    """

    entries: Sequence[Entry]
    verdict: Line
    sections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    closing: Sequence[str] = ()
    more: str = ""
    headline: str = ""


def columns() -> int:
    """How wide the terminal is. Into a pipe or a file lines go whole, for `grep`; COLUMNS overrides both."""
    return shutil.get_terminal_size((_UNBROKEN, 0)).columns


def lay_out(report: TextReport, width: int, every: bool = False) -> Iterator[Line]:
    """Yields the lines of a report, printable, of at most `width` columns where words allow it.

    `every`: all findings with all details; otherwise the first 20, and details of the first of each of three kinds.
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
    if not (report.headline and len(report.entries) == 1 and report.entries[0].fields):  # said by the headline
        yield [*(line for one in listed for line in _listed(one, widths, width)), *more]
    firsts = {_label(one): one for one in reversed(report.entries)}
    chosen = report.entries if every else [one for one in report.entries if firsts[_label(one)] is one][:_DETAILED]
    detailed = [one for one in chosen if one.fields]
    yield from (_detailed(one, width) for one in detailed)
    if left := sum(bool(one.fields) for one in report.entries) - len(detailed):
        yield _wrapped(f"Details of {left} more finding{'s' * (left > 1)}: {report.more}.", "", "", width)
    for name, lines in report.sections.items():
        yield [(f"{printable(name)}:", ""), *(part for line in lines for part in _hanging(line, width))]
    closing = [part for line in report.closing for part in _wrapped(line, "", "  ", width)]
    yield [*closing, (report.verdict[0], printable(report.verdict[1]))]


def plain(lines: Iterator[Line]) -> Iterator[str]:
    """The lines without emphasis, and without blanks at their end."""
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


def _detailed(one: Entry, width: int) -> Iterator[Line]:
    yield f"{one.anchor or one.kind} {one.severity}", f": {printable(one.title)}" if one.title else ""
    for label, text in one.fields:
        yield from _wrapped(text, f"  {label:<{_LABELS}}  ", " " * (_LABELS + 4), width)


def _wrapped(text: str, first: str, rest: str, width: int) -> Iterator[Line]:
    """The text between words; a name longer than a line stays whole."""
    yield from (("", line) for line in _words(text, width, first, rest))


def _hanging(text: str, width: int) -> Iterator[Line]:
    """A line of a section, which is indented as it is and two more where it goes on."""
    indent = " " * (2 + len(text) - len(text.lstrip(" ")))
    yield from _wrapped(text.lstrip(" "), indent, f"{indent}  ", width)


def _words(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
