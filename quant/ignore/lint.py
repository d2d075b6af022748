"""Checks the list of unquantized modules of a config.json, and finds a list that all readers agree on.

Reads no weights: names come from the index, the header of the file, or the classes of the model. A report as text has
findings, the table of entries, the portable list, and the verdict last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.findings_text import Entry, TextReport, columns, lay_out, plain
from ckptkit.core.specs import fold
from ckptkit.formats.detect import locate, refuse_url
from ckptkit.formats.hf.reader import MODELOPT_CONFIG, read_json
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.ignore.agree import without_numbers
from ckptkit.quant.ignore.names import entries_for, fused_layer
from ckptkit.quant.ignore.readers import KEYS
from ckptkit.quant.ignore.rules import ORDER, LintFinding, examine, finding, idle
from ckptkit.quant.ignore.subject import WRITTEN, IgnoreList, open_subject
from ckptkit.storage.write import write_whole

_DISAGREEMENTS = ("refused", "disagreement", "exposed")


@dataclass(frozen=True)
class LintReport:
    """The result of `lint`."""

    path: str
    names: str  # where tensor names come from
    tensors: int  # how many matrices there are
    packed: int  # how many of them are quantized, or would be by the list
    patterns: Mapping[str, Mapping[str, tuple[str, ...]]]  # tensors (folded) that each entry covers for each reader
    findings: tuple[LintFinding, ...]
    # A list that packs the same and on which the checked readers agree; None: there is none.
    portable: tuple[str, ...] | None
    fixed: bool = False  # it was written to config.json
    key: str = "ignore"  # where config.json has the list
    scheme: str = "INT4"  # what the packed matrices are
    readers: tuple[str, ...] = ()  # those that were chosen; empty: all

    @property
    def failed(self) -> bool:
        """Whether any finding is an error."""
        return any(one.severity == "error" for one in self.findings)

    @property
    def disagreed(self) -> bool:
        """Whether readers disagree about what is packed, or one of them refuses the config: more than a note."""
        return self.portable is None or any(
            one.kind in _DISAGREEMENTS and one.severity != "note" for one in self.findings
        )

    @property
    def warnings(self) -> int:
        """How many findings are warnings."""
        return sum(one.severity == "warning" for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        own = {key: value for key, value in vars(self).items() if key != "findings"}
        return {"schema": "ckptkit-lint/1", **own, "findings": [vars(one) for one in self.findings]}


def portable_list(subject: IgnoreList) -> tuple[str, ...] | None:
    """Returns a list that makes the checked readers agree on what is packed; None when there is none.

    Entries that readers take differently are replaced, and missing ones added. Entries that all readers take the
    same way, or that cannot be judged, stay in their order. Linear layers that only transformers names, such as those
    of a vision tower, stay covered if they were.
    """
    if not subject.is_compressed:
        return _whole_names(subject)
    suspects = {pattern for one in subject.divergences(subject.readings) for pattern in one.patterns}
    readings = [subject.readings[reader] for reader in subject.readers]
    spares = {
        pattern
        for pattern in subject.ignore
        if any(subject.packed[index] for reading in readings for index in reading.covering(pattern))
    }
    dropped = suspects | spares | (set(idle(subject)) if subject.whole else set())
    stays = [pattern for pattern in subject.ignore if pattern not in dropped]
    exposed = {one.tensor for one in subject.divergences(subject.read(stays))}
    missing = {matrix.module: matrix.entry for matrix, packs in subject.pairs if not packs and matrix.tensor in exposed}
    packed = {matrix.module for matrix, packs in subject.pairs if packs}
    found = tuple(dict.fromkeys([*stays, *entries_for(missing, packed)]))
    # Unpacked Linear layers, by transformers' names, that the old list covers and this one does not.
    before, after = ({name for one in several for name in subject.spelled(one)} for several in (subject.ignore, found))
    found += tuple(sorted(before - after - packed))
    return None if subject.divergences(subject.read(found)) else found


def _whole_names(subject: IgnoreList) -> tuple[str, ...] | None:
    """As `portable_list`, of whole module names, for engines and transformers, in other formats.

    The list as it is where they agree already. Entries that no reader looks up stay.
    """
    if subject.is_agreed:
        return subject.ignore
    looking = [subject.readings[reader] for reader in subject.engines]
    asked = [any(one.asked[index] for one in looking) for index in range(len(subject.matrices))]
    names = (
        fused_layer(matrix.module, None) if matrix.expert else matrix.module
        for (matrix, packs), looked_up in zip(subject.pairs, asked, strict=True)
        if looked_up and not packs
    )
    found = tuple(dict.fromkeys([*sorted(names, key=_by_number), *subject.idle]))
    agreed = not any(row.refuses(entry) for row in subject.rows.values() for entry in found)
    return found if agreed and not subject.divergences(subject.read(found), subject.engines) else None


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


def pattern_table(subject: IgnoreList) -> dict[str, dict[str, tuple[str, ...]]]:
    """Returns the tensors (folded) that each entry covers for each reader."""
    folded: dict[tuple[int, ...], tuple[str, ...]] = {}
    table: dict[str, dict[str, tuple[str, ...]]] = {}
    for pattern in subject.ignore:
        for reader in subject.every_reader:
            reading = subject.readings[reader]
            indices = tuple(reading.covering(pattern))
            if indices not in folded:
                folded[indices] = tuple(fold(subject.matrices[index].tensor for index in indices))
            table.setdefault(pattern, {})[reader] = folded[indices]
        if not any(table[pattern].values()):
            spelled = tuple(fold(f"{name}.weight" for name in sorted(subject.spelled(pattern))))
            table[pattern] |= dict.fromkeys(set(table[pattern]) & {"compressed-tensors", "transformers"}, spelled)
    return table


def lint(path: str | Path, *, readers: Sequence[str] | None = None, fix: bool = False) -> LintReport:
    """Checks the list of unquantized modules of the checkpoint at `path`; config.json is enough, or an index too.

    `readers` (as `--reader`): those that must agree; None: all. Severities: `ckptkit.quant.ignore.readers.severity_of`.
    `fix`: writes the portable list into config.json and keeps the original as config.json.orig.
    Raises CkptkitError as `open_subject` and `locate` do, for a Megatron checkpoint, for a URL, and with `fix` when
    there is no portable list.
    """
    refuse_url(path)
    root = Path(path)
    root = root.parent if root.name == "config.json" else root
    if not (root / "config.json").exists() and locate(root).is_megatron:
        raise CkptkitError(f"{root} is a Megatron checkpoint", "lint reads HF directories: give the one it came from")
    subject, names = open_subject(root, readers)
    portable = portable_list(subject)
    findings = examine(subject)
    if portable is None and all(one.severity == "note" for one in findings):
        message = f"no `{subject.key}` list makes {' and '.join(subject.readers)} agree on what is packed"
        hint = "quantize again with `ckptkit quantize`, or name those who must agree with --reader"
        findings = (finding("disagreement", "error", message, hint, [], subject.readers), *findings)
    report = LintReport(
        str(root),
        names,
        len(subject.matrices),
        sum(subject.packed),
        pattern_table(subject),
        findings,
        portable,
        key=subject.key,
        scheme="INT4" if subject.is_int4 else "quantized",
        readers=() if readers is None else subject.readers,
    )
    agreed = portable == subject.ignore if subject.is_compressed else subject.is_agreed
    if not fix or agreed:
        return report
    if portable is None:
        why = min(findings, key=lambda one: ORDER.index(one.severity)).message
        raise CkptkitError(
            f"{root / 'config.json'}: no ignore list makes all readers agree on what is packed: {why}",
            "quantize again with `ckptkit quantize`",
        )
    _write_list(subject, portable)
    return replace(report, fixed=True)


def _write_list(subject: IgnoreList, entries: Sequence[str]) -> None:
    """Writes `entries` into config.json and hf_quant_config.json, as far as they are there."""
    config = read_json(subject.path / "config.json")
    if isinstance(content := quantization_of(config), dict):
        for key in () if subject.is_compressed else KEYS[subject.method]:
            content.pop(key, None)
        content.update((key, list(entries)) for key in WRITTEN.get(subject.method, ("ignore",)))
        _rewrite(subject.path / "config.json", config)
    if (other := subject.path / MODELOPT_CONFIG).exists():
        config = read_json(other)
        nested = config.get("quantization")
        (nested if isinstance(nested, dict) else config)["exclude_modules"] = list(entries)
        _rewrite(other, config)


def _rewrite(file: Path, config: Mapping[str, Any]) -> None:
    """Replaces a JSON file; keeps the old one as FILE.orig unless that exists already."""
    original = file.with_name(f"{file.name}.orig")
    if not original.exists():
        write_whole(original, file.read_bytes())
    write_whole(file, json.dumps(config, indent=2) + "\n")


_COPIED = 40  # entries of a list shown one by one
_SHOWN_TENSORS = 4  # folded tensors in a line


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


def _alike(patterns: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[tuple[str, Mapping[str, Sequence[str]]]]:
    """Yields the entries, with those as one that differ in numbers alone and so do the tensors that they cover."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for pattern, covers in patterns.items():
        kinds = tuple((reader, tuple(map(without_numbers, tensors))) for reader, tensors in covers.items())
        groups.setdefault((pattern if pattern.startswith("re:") else without_numbers(pattern), kinds), []).append(
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


def _closing(report: LintReport) -> Iterator[str]:
    yield f"{report.packed} of {report.tensors} matrices are {report.scheme} (names from {report.names})"
    if report.fixed:
        yield "fixed: config.json has the list above; the original is config.json.orig"
    if report.portable is None:
        yield f"no {report.key} list makes {_readers(report)} agree on what is packed"


def _readers(report: LintReport) -> str:
    return " and ".join(report.readers) or "all readers"


def _verdict(report: LintReport) -> tuple[str, str]:
    counts = (("error", sum(finding.severity == "error" for finding in report.findings)), ("warning", report.warnings))
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
    rest = len(tensors) - _SHOWN_TENSORS
    return (", ".join(tensors[:_SHOWN_TENSORS]) or "nothing") + (f" and {rest} more" if rest > 0 else "")
