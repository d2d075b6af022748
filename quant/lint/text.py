"""Formats a lint report as lines of text: findings, the table of entries, the portable list, and the verdict last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckptkit.core.findings_text import Entry, TextReport, columns, lay_out, plain
from ckptkit.core.specs import fold
from quant.lint.finding import LintFinding
from quant.lint.lint import LintReport

_COPIED = 40  # entries of a list shown one by one
_SHOWN = 4  # folded tensors in a line


def lines(report: LintReport, width: int | None = None) -> Iterator[str]:
    """Yields the report for people; `width` None is that of the terminal."""
    sections: dict[str, Sequence[str]] = {}
    if report.findings:
        alike = list(_alike(report.patterns))
        sections[f"entries of `{report.key}`, and what each reader takes them for"] = [
            *(line for pattern, covers in alike[:_COPIED] for line in (pattern, *_row(covers))),
            *([f"and {len(alike) - _COPIED} more: `--json` has all"] if len(alike) > _COPIED else []),
        ]
    if report.portable is not None and report.portable != tuple(report.patterns):
        sections[f"portable {report.key} list"] = _few(report.portable)
    text = TextReport(
        [_entry(finding) for finding in report.findings], _verdict(report), sections, list(_closing(report))
    )
    yield from plain(lay_out(text, width or columns(), every=True))


def _alike(
    patterns: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[tuple[str, Mapping[str, Sequence[str]]]]:
    """Yields the entries, with those as one that differ in numbers alone and so do the tensors that they cover."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for pattern, covers in patterns.items():
        kinds = tuple((reader, tuple(map(_without_numbers, tensors))) for reader, tensors in covers.items())
        groups.setdefault((pattern if pattern.startswith("re:") else _without_numbers(pattern), kinds), []).append(
            pattern
        )
    for several in groups.values():
        readers = patterns[several[0]]
        yield (
            _shortened(fold(several)),
            {
                reader: fold(dict.fromkeys(tensor for pattern in several for tensor in patterns[pattern][reader]))
                if len(several) > 1
                else readers[reader]
                for reader in readers
            },
        )


def _few(entries: Sequence[str]) -> Sequence[str]:
    """The entries, folded where they are too many to copy from a terminal: `--json` has each of them."""
    if len(entries) <= _COPIED:
        return entries
    folded = fold(entries)
    more = len(folded) - _COPIED
    return folded if more <= 0 else [*folded[:_COPIED], f"and {more} more: `--json` has all"]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _closing(report: LintReport) -> Iterator[str]:
    yield f"{report.packed} of {report.tensors} matrices are {report.scheme} (names from {report.names})"
    if report.fixed:
        yield "fixed: config.json has the list above; the original is config.json.orig"
    if report.portable is None:
        yield f"no {report.key} list makes {_readers(report)} agree on what is packed"


def _readers(report: LintReport) -> str:
    return " and ".join(report.readers) or "all readers"


def _verdict(report: LintReport) -> tuple[str, str]:
    counts = (
        ("error", sum(finding.severity == "error" for finding in report.findings)),
        ("warning", report.warnings),
    )
    counted = " and ".join(f"{count} {word}{'s' * (count != 1)}" for word, count in counts if count)
    verdict = "FAILED" if report.failed else "READERS DISAGREE" if report.disagreed else "PASSED"
    status = "FIXED" if report.fixed else verdict
    agreed = "" if report.findings else f": {_readers(report)} agree"
    return (f"{status} with {counted}" if counted and not report.fixed else status), f"  {report.path}{agreed}"


def _row(covers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields what an entry covers, with one line for readers that agree."""
    readers: dict[tuple[str, ...], list[str]] = {}
    for reader, tensors in covers.items():
        readers.setdefault(tuple(tensors), []).append(reader)
    for tensors, who in readers.items():
        yield f"    {', '.join(who)}: {_shortened(tensors)}"


def _entry(finding: LintFinding) -> Entry:
    count = f" ({finding.count} tensors)" if finding.count > 1 else ""
    fields = [("tensor", _shortened(finding.tensors) + count)] if finding.tensors else []
    fields += [("actual", finding.message), ("next", finding.hint)]
    return Entry(finding.kind, finding.severity, "", finding.message, fields)


def _shortened(tensors: Sequence[str]) -> str:
    rest = len(tensors) - _SHOWN
    return (", ".join(tensors[:_SHOWN]) or "nothing") + (f" and {rest} more" if rest > 0 else "")
