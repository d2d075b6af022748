"""Checks the list of unquantized modules in a config.json, and finds a list that all readers agree on.

Reads no weights: names come from the index, the header of the file, or the model's classes. The text report contains
the findings, the table of entries, the portable list and, last, the verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.findings_text import Entry, TextReport, columns, lay_out, plain
from ckptkit.core.signature import public
from ckptkit.core.specs import fold
from ckptkit.formats.detect import locate, refuse_url
from ckptkit.formats.hf.reader import MODELOPT_CONFIG, read_json
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.ignore.agree import without_numbers
from ckptkit.quant.ignore.names import entries_for, fused_layer
from ckptkit.quant.ignore.readers import KEYS
from ckptkit.quant.ignore.rules import ORDER, LintFinding, examine, finding, idle
from ckptkit.quant.ignore.subject import WRITTEN, IgnoreList, open_subject
from ckptkit.storage.write import write_atomically

_DISAGREEMENTS = ("refused", "disagreement", "exposed")


@dataclass(frozen=True)
class LintReport:
    """The result of `lint`."""

    path: str
    names: str  # the source of the tensor names
    tensors: int  # number of matrices
    packed: int  # number of matrices that are quantized, or would be by the list
    patterns: Mapping[str, Mapping[str, tuple[str, ...]]]  # tensors (folded) that each entry covers for each reader
    findings: tuple[LintFinding, ...]
    portable: tuple[str, ...] | None  # a list with the same packing that the checked readers agree on, or None
    fixed: bool = False  # `portable` was written to config.json
    key: str = "ignore"  # the key of the list in config.json
    scheme: str = "INT4"  # the format of packed matrices
    readers: tuple[str, ...] = ()  # the chosen readers; empty: all

    def __str__(self) -> str:
        """The text that `ckptkit lint` prints."""
        sections: dict[str, Sequence[str]] = {}
        if self.findings:
            alike = list(_alike(self.patterns))
            sections[f"entries of `{self.key}`, and the tensors that they cover for each reader"] = [
                *(line for pattern, covers in alike[:_COPIED] for line in (pattern, *_row(covers))),
                *([f"and {len(alike) - _COPIED} more: `--json` has all"] if len(alike) > _COPIED else []),
            ]
        if self.portable is not None and self.portable != tuple(self.patterns):
            sections[f"portable {self.key} list"] = _few(self.portable)
        text = TextReport([_entry(one) for one in self.findings], _verdict(self), sections, list(_closing(self)))
        return "\n".join(plain(lay_out(text, columns(), every=True)))

    @property
    def failed(self) -> bool:
        return any(one.severity == "error" for one in self.findings)

    @property
    def disagreed(self) -> bool:
        """Whether readers disagree about the packed weights, or one of them refuses the config; notes do not count."""
        return self.portable is None or any(
            one.kind in _DISAGREEMENTS and one.severity != "note" for one in self.findings
        )

    @property
    def warnings(self) -> int:
        return sum(one.severity == "warning" for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if key != "findings"}
        return {"schema": "ckptkit-lint/1", **values, "findings": [vars(one) for one in self.findings]}


def portable_list(subject: IgnoreList) -> tuple[str, ...] | None:
    """Returns a list that makes the checked readers agree on the packed weights, or None.

    Replaces entries that readers interpret differently, and adds missing ones. Keeps the other entries in their order.
    Linear layers that only transformers names, such as those of a vision tower, stay covered if they were.
    """
    if not subject.is_compressed:
        return _list_module_names(subject)
    suspects = {pattern for one in subject.divergences(subject.readings) for pattern in one.patterns}
    readings = [subject.readings[reader] for reader in subject.readers]
    spares = {
        pattern
        for pattern in subject.ignore
        if any(subject.packed[index] for reading in readings for index in reading.covering(pattern))
    }
    dropped = suspects | spares | (set(idle(subject)) if subject.whole else set())
    kept = [pattern for pattern in subject.ignore if pattern not in dropped]
    exposed = {one.tensor for one in subject.divergences(subject.read(kept))}
    missing = {matrix.module: matrix.entry for matrix, packs in subject.pairs if not packs and matrix.tensor in exposed}
    packed = {matrix.module for matrix, packs in subject.pairs if packs}
    entries = tuple(dict.fromkeys([*kept, *entries_for(missing, packed)]))
    # Unpacked Linear layers, by transformers' names, that only the old list covers.
    before, after = (
        {name for entry in several for name in subject.covered_linears(entry)} for several in (subject.ignore, entries)
    )
    entries += tuple(sorted(before - after - packed))
    return None if subject.divergences(subject.read(entries)) else entries


def _list_module_names(subject: IgnoreList) -> tuple[str, ...] | None:
    """Like `portable_list`, for other formats: full module names, or the list if engines agree on it."""
    if subject.is_agreed:
        return subject.ignore
    readings = [subject.readings[reader] for reader in subject.engines]
    names = (
        fused_layer(matrix.module, None) if matrix.expert else matrix.module
        for index, (matrix, packs) in enumerate(subject.pairs)
        if not packs and any(reading.lookups[index] for reading in readings)
    )
    entries = tuple(dict.fromkeys([*sorted(names, key=_by_number), *subject.idle]))
    if any(row.refuses(entry) for row in subject.rows.values() for entry in entries):
        return None
    return None if subject.divergences(subject.read(entries), subject.engines) else entries


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


def pattern_table(subject: IgnoreList) -> dict[str, dict[str, tuple[str, ...]]]:
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
            spelled = tuple(fold(f"{name}.weight" for name in sorted(subject.covered_linears(pattern))))
            table[pattern] |= dict.fromkeys(set(table[pattern]) & {"compressed-tensors", "transformers"}, spelled)
    return table


@public()
def lint(path: str | Path, *, readers: Sequence[str] | None = None, fix: bool = False) -> LintReport:
    """Checks the list of unquantized modules of the checkpoint at `path`; needs only config.json or also the index.

    `readers` (like `--reader`): those that must agree, or None for all. Severities:
    `ckptkit.quant.ignore.readers.severity_of`. `fix`: writes the portable list into config.json and keeps the original
    as config.json.orig. Raises CkptkitError like `open_subject` and `locate`, for a Megatron checkpoint, for a URL, and
    with `fix` if there is no portable list.
    """
    refuse_url(path)
    root = Path(path)
    root = root.parent if root.name == "config.json" else root
    if not (root / "config.json").exists() and locate(root).kind == "megatron":
        raise CkptkitError(f"{root} is a Megatron checkpoint", "pass the HF directory that it was made from to lint")
    subject, names = open_subject(root, readers)
    portable = portable_list(subject)
    findings = examine(subject)
    if portable is None and all(one.severity == "note" for one in findings):
        message = f"no `{subject.key}` list makes {' and '.join(subject.readers)} agree on the packed weights"
        hint = "quantize again with `ckptkit quantize`, or pass --reader for the readers that must agree"
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
        message = f"{root / 'config.json'}: no ignore list makes all readers agree on the packed weights: {why}"
        raise CkptkitError(message, "quantize again with `ckptkit quantize`")
    _write_list(subject, portable)
    return replace(report, fixed=True)


def _write_list(subject: IgnoreList, entries: Sequence[str]) -> None:
    """Writes `entries` into config.json and hf_quant_config.json, if they exist."""
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
        write_atomically(original, file.read_bytes())
    write_atomically(file, json.dumps(config, indent=2) + "\n")


_COPIED = 40  # entries of a list shown one by one
_SHOWN_TENSORS = 4  # folded tensors in a line


def _alike(patterns: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[tuple[str, Mapping[str, Sequence[str]]]]:
    """Yields the entries; those that differ only in numbers, like the tensors that they cover, are one."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for pattern, covers in patterns.items():
        kinds = tuple((reader, tuple(map(without_numbers, tensors))) for reader, tensors in covers.items())
        key = (pattern if pattern.startswith("re:") else without_numbers(pattern), kinds)
        groups.setdefault(key, []).append(pattern)
    for several in groups.values():
        readers = patterns[several[0]]
        if len(several) > 1:
            readers = {
                reader: fold(dict.fromkeys(tensor for pattern in several for tensor in patterns[pattern][reader]))
                for reader in readers
            }
        yield _shortened(fold(several)), readers


def _few(entries: Sequence[str]) -> Sequence[str]:
    """The entries, folded if there are too many to copy from a terminal; `--json` has each of them."""
    folded = entries if len(entries) <= _COPIED else fold(entries)
    more = len(folded) - _COPIED
    return folded if more <= 0 else [*folded[:_COPIED], f"and {more} more: `--json` has all"]


def _closing(report: LintReport) -> Iterator[str]:
    yield f"{report.packed} of {report.tensors} matrices are {report.scheme} (names from {report.names})"
    if report.fixed:
        yield "fixed: config.json has the list above; the original is config.json.orig"
    if report.portable is None:
        yield f"no {report.key} list makes {_readers(report)} agree on the packed weights"


def _readers(report: LintReport) -> str:
    return " and ".join(report.readers) or "all readers"


def _verdict(report: LintReport) -> tuple[str, str]:
    counts = (("error", sum(finding.severity == "error" for finding in report.findings)), ("warning", report.warnings))
    counted = " and ".join(f"{count} {word}{'s' * (count != 1)}" for word, count in counts if count)
    verdict = "FAILED" if report.failed else "READERS DISAGREE" if report.disagreed else "PASSED"
    status = "FIXED" if report.fixed else f"{verdict} with {counted}" if counted else verdict
    return status, f"  {report.path}" + ("" if report.findings else f": {_readers(report)} agree")


def _row(covers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields the tensors that an entry covers, with one line for readers that agree."""
    readers: dict[tuple[str, ...], list[str]] = {}
    for reader, tensors in covers.items():
        readers.setdefault(tuple(tensors), []).append(reader)
    for tensors, names in readers.items():
        yield f"    {', '.join(names)}: {_shortened(tensors)}"


def _entry(finding: LintFinding) -> Entry:
    count = f" ({finding.count} tensors)" if finding.count > 1 else ""
    fields = [("tensor", _shortened(finding.tensors) + count)] if finding.tensors else []
    fields += [("actual", finding.message), ("next", finding.hint)]
    return Entry(finding.kind, finding.severity, "", finding.message, fields)


def _shortened(tensors: Sequence[str]) -> str:
    more = len(tensors) - _SHOWN_TENSORS
    return (", ".join(tensors[:_SHOWN_TENSORS]) or "nothing") + (f" and {more} more" if more > 0 else "")
