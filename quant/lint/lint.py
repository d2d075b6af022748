"""What is wrong with the `ignore` list of an INT4 config.json, and the list that every reader takes alike.

No weights are read: names come from the index, or from the headers of the files, or from the classes of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import fold
from ckptkit.formats.detect import refuse_url
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.hf.side_files import quantization_of
from quant.lint.rules import LintFinding, examine, idle
from quant.lint.subject import Subject, open_subject
from quant.selection.readers import RULES
from quant.selection.spelling import entries_for


@dataclass(frozen=True)
class LintReport:
    """What was found. `names`: where tensor names come from. `patterns`: for every entry and reader the tensors (folded) that it covers.

    `packed`: modules that are, or by the list would be, INT4, of `tensors` matrices. `portable`: a list that all readers
    take alike and that packs the same; None when there is none.
    """

    path: str
    names: str
    tensors: int
    packed: int
    patterns: Mapping[str, Mapping[str, tuple[str, ...]]]
    findings: tuple[LintFinding, ...]
    portable: tuple[str, ...] | None
    fixed: bool = False

    @property
    def failed(self) -> bool:
        """Whether there is anything worse than a note."""
        return any(finding.severity != "note" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        own = {key: value for key, value in vars(self).items() if key != "findings"}
        return {"schema": "ckptkit-lint/1", **own, "findings": [vars(finding) for finding in self.findings]}


def portable_list(subject: Subject) -> tuple[str, ...] | None:
    """The list with what is read differently replaced, and what is exposed added; None when no list makes all readers agree on what is packed.

    Entries that every reader takes alike stay as they are, in their order, and so do those that cannot be judged. Of Linear layers that
    only transformers names, such as a vision tower's, none is left uncovered that was covered.
    """
    everybody = replace(subject, readers=tuple(RULES))
    suspects = {pattern for one in everybody.divergences(subject.readings) for pattern in one.patterns}
    spares = {pattern for pattern in subject.ignore if _spares_packed(subject, pattern)}
    unused = set(idle(subject)) if subject.whole else set()
    stays = [pattern for pattern in subject.ignore if pattern not in suspects | spares | unused]
    exposed = {one.tensor for one in everybody.divergences(everybody.read(stays))}
    pairs = list(zip(subject.matrices, subject.packed, strict=True))
    missing = {matrix.module: matrix.entry for matrix, packs in pairs if not packs and matrix.tensor in exposed}
    found = tuple(dict.fromkeys([*stays, *entries_for(missing, {matrix.module for matrix, packs in pairs if packs})]))
    found += tuple(_uncovered(subject, found))
    return None if everybody.divergences(everybody.read(found)) else found


def _uncovered(subject: Subject, found: Sequence[str]) -> list[str]:
    """Linear layers, by transformers' names, that the list covers, `found` does not, and that are not packed under the release's name."""
    before = {name for pattern in subject.ignore for name in subject.spelled(pattern)}
    after = {name for pattern in found for name in subject.spelled(pattern)}
    packed = {matrix.module for matrix, packs in zip(subject.matrices, subject.packed, strict=True) if packs}
    return sorted(before - after - packed)


def _spares_packed(subject: Subject, pattern: str) -> bool:
    return any(subject.packed[index] for reading in subject.readings.values() for index in reading.covering(pattern))


def pattern_table(subject: Subject) -> dict[str, dict[str, tuple[str, ...]]]:
    """For every entry and reader the tensors (folded) that it covers."""
    folded: dict[tuple[int, ...], tuple[str, ...]] = {}
    table: dict[str, dict[str, tuple[str, ...]]] = {}
    for pattern in subject.ignore:
        for reader, reading in subject.readings.items():
            indices = tuple(reading.covering(pattern))
            if indices not in folded:
                folded[indices] = tuple(fold(subject.matrices[index].tensor for index in indices))
            table.setdefault(pattern, {})[reader] = folded[indices]
        if not any(table[pattern].values()):
            spelled = tuple(fold(f"{name}.weight" for name in subject.spelled(pattern)))
            table[pattern] |= dict.fromkeys(("compressed-tensors", "transformers"), spelled)
    return table


def lint(path: str | Path, *, readers: Sequence[str] | None = None, fix: bool = False) -> LintReport:
    """Looks at the `ignore` list of the checkpoint at `path`; a lone config.json, or one with an index and no weights, is enough.

    `readers` (as `--reader`) are those whose agreement is wanted; None: all, and `quant.selection.readers.severity_of` says whose counts. `fix`
    writes the portable list into config.json, and keeps the original beside it as config.json.orig. Raises CkptkitError as
    `open_subject` does, for a URL, and when there is no list to write.
    """
    refuse_url(path)
    root = Path(path)
    root = root.parent if root.name == "config.json" else root
    subject, names = open_subject(root, readers)
    portable = portable_list(subject)
    findings = examine(subject)
    report = LintReport(
        str(root), names, len(subject.matrices), sum(subject.packed), pattern_table(subject), findings, portable
    )
    if not fix or portable == subject.ignore:
        return report
    if portable is None:
        why = next((finding.message for finding in findings if finding.severity == "error"), "readers cannot agree")
        raise CkptkitError(
            f"{root / 'config.json'}: no ignore list makes all readers agree on what is packed: {why}",
            "quantize again with `ckptkit quantize`",
        )
    write_ignore(root / "config.json", portable)
    return replace(report, fixed=True)


def write_ignore(file: Path, ignore: Sequence[str]) -> None:
    """Replaces `ignore` where config.json has it; the file as it was stays beside it as config.json.orig, unless one is there already."""
    config = read_json(file)
    quantization_of(config)["ignore"] = list(ignore)
    original, partial = file.with_name(f"{file.name}.orig"), file.with_name(f"{file.name}.partial")
    if not original.exists():
        original.write_bytes(file.read_bytes())
    partial.write_text(json.dumps(config, indent=2) + "\n")
    partial.replace(file)
