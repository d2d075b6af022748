"""The data model of a verification: findings, results of checks, and the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args

from ckptkit.verify.evidence.folding import by_key

# Imported by name, since the formats import this module.
_WRITERS, _TEXT = "ckptkit.verify.reports", "ckptkit.verify.reports.render"
SCHEMA = "ckptkit-report/2"

# The wording for each part that was not checked; for programs it is "not asked".
NOT_GIVEN = {
    "source": "not given",
    "base model": "not given",
    "target": "not given",
    "weights": "not compared",
    "some weights": "not compared",
}
NOTES = "notes"  # the fact that lists remarks
ACCEPTED = "accepted as not checked"  # the fact that lists incomplete checks of `--accept`
BEHAVIOUR = "behaviour"  # the stage, and the fact that lists its comparisons
_LENGTH = 100  # characters of a reason in the verdict
_CODES = 3  # codes of checks in the verdict
_CODE = re.compile(r"CK\d{3}")

Severity = Literal["error", "warning"]
Status = Literal["passed", "failed", "skipped"]  # of a check in a report


@dataclass(frozen=True)
class Finding:
    """A fault. `tensor` may be folded (`layers.{0..11}.mlp.gate.weight`), and `count` is the number of tensors.

    A finding with a `cause`, the anchor of the finding that explains it, does not count. `names` are all the tensors,
    and `also_affected` are further tensors with the same fault; neither is in the JSON.
    """

    code: str
    expected: str
    actual: str
    hint: str
    tensor: str | None = None
    count: int = 1
    file: str | None = None
    rank: str | None = None
    severity: Severity = "error"
    cause: str | None = None
    names: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    also_affected: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join(import_module(_TEXT).finding_lines(self))

    def to_json(self) -> dict[str, Any]:
        """The finding as in the JSON report."""
        return {key: value for key, value in vars(self).items() if key not in ("names", "also_affected")}


@dataclass
class CheckResult:
    """The result of one check, which fills in its counts and facts (`facts["pipeline stages"] = [...]`) as it runs.

    `reason` explains why it is incomplete, or does not apply, and `because` are codes of checks that report the reason.
    `failed` is the title of its findings, which have no causes here.
    """

    code: str
    title: str
    status: Status | Literal["not applicable"] = "passed"
    reason: str | None = None
    tensors_compared: int = 0
    bytes_compared: int = 0
    seconds: float = 0.0
    failed: str = ""
    because: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)

    def compared(self, tensors: int = 1, nbytes: int = 0) -> None:
        """Counts tensors (or header entries, or files), and the bytes of them that were read."""
        self.tensors_compared += tensors
        self.bytes_compared += nbytes

    def stop(self, reason: str, *because: str) -> None:
        """Notes why the check is incomplete."""
        self.reason, self.because = reason, because

    def add_to_verdict(self, text: str) -> None:
        """Adds a comparison to the verdict, for a check of the stage `behaviour`."""
        self.facts.setdefault(BEHAVIOUR, []).append(text)

    def note(self, text: str) -> None:
        """Adds a remark to `facts["notes"]`: something that users should know and that is not wrong."""
        self.facts.setdefault(NOTES, []).append(text)

    def to_json(self) -> dict[str, Any]:
        """The result as in the JSON report."""
        keys = ("code", "title", "status", "reason", "tensors_compared", "seconds")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Report:
    """Everything that one command found. `facts` are printed but not judged, such as the layers of pipeline stages.

    `model` describes the model in a few words, and `date` is the time of the report (UTC, ISO 8601), if known.
    `reasons` explain why the report is incomplete. `asked` are the parts that were checked (`files`, `values`,
    `manifest`, `Megatron` ...), and `not_asked` the optional parts that were not. `heat` is the result of
    `ckptkit.verify.reports.heat.heat_map`: layer -> kind of tensor -> comparison.
    """

    version: str
    command: Sequence[str]
    checkpoint: str
    source: str | None
    checks: Sequence[CheckResult]
    findings: Sequence[Finding]
    facts: Mapping[str, Sequence[str]]
    heat: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    reasons: Sequence[str] = ()
    model: str | None = None
    date: str | None = field(default=None, compare=False)
    asked: Sequence[str] = ()
    not_asked: Sequence[str] = ()
    launch: str | None = None  # the script that preflight read; not in the JSON

    def __str__(self) -> str:
        """The text that `ckptkit verify` prints."""
        text = import_module(_TEXT)
        return "\n".join(text.plain(text.report_lines(self, text.columns())))

    @property
    def status(self) -> Literal["passed", "failed", "inconclusive"]:
        """`failed` with any error or failed check, else `inconclusive` if a requested part was not checked."""
        if self.errors or any(check.status == "failed" for check in self.checks):
            return "failed"
        return "inconclusive" if self.reasons else "passed"

    @property
    def errors(self) -> int:
        """The number of errors without a cause among the findings."""
        return sum(finding.severity == "error" and finding.cause is None for finding in self.findings)

    @property
    def warnings(self) -> int:
        """The number of warnings without a cause among the findings."""
        return sum(finding.severity == "warning" and finding.cause is None for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The status in capitals with the numbers of errors and warnings, and the scope unless it failed.

        For example `FAILED with 2 errors`, or `PASSED files and values; Megatron not asked`.
        """
        counts = (("error", self.errors), ("warning", self.warnings))
        counted = " and ".join(f"{count} {word}{'s' * (count != 1)}" for word, count in counts if count)
        text = f"{self.status.upper()} with {counted}" if counted else self.status.upper()
        if self.status == "inconclusive":
            passed = [f"{_listed(self._compared)} passed"] if self._compared else []
            reason, codes = split_reason(self.reasons[0])
            first = shorten(reason.partition("; ")[0].rstrip("."), _LENGTH, placeholder=" ...")
            more = f", and {len(self.reasons) - 1} more" if len(self.reasons) > 1 else ""
            unseen = f"not looked at: {f'{codes} ({first})' if codes else first}{more}"
            return f"{text}: {'; '.join([*passed, *self._behaviour, unseen])}"
        if self.status != "passed" or not self.asked:
            return text
        return f"{text}{':' if counted else ''} {self.scope}"

    @property
    def scope(self) -> str:
        """One line: the parts that were compared, then those that were not."""
        missing = list(self.not_asked)
        parts = [*filter(None, [_listed(self._compared)]), *self._behaviour] or ["nothing"]
        if "values" in self.asked and "source" in missing:
            missing.remove("source")
        if self.is_uncompared:
            parts.append("not compared with a release (no --source): weights, config, tokenizer")
        if accepted := self.facts.get(ACCEPTED):
            parts.append(f"{', '.join(split_reason(line)[1] for line in accepted)} accepted as not checked")
        without = by_key((NOT_GIVEN.get(name, "not asked"), name) for name in missing)
        return "; ".join([*parts, *(f"{', '.join(names)} {how}" for how, names in without.items())])

    @property
    def is_uncompared(self) -> bool:
        """Whether a checkpoint was only checked in itself: no value was compared with a source or a manifest."""
        return "values" in self.asked and "source" in self.not_asked and "manifest" not in self.asked

    @property
    def _compared(self) -> list[str]:
        """The parts that were compared. Values are compared with a source or a manifest."""
        names = {name: name for name in self.asked if name not in (BEHAVIOUR, "manifest")}
        if "source" in self.not_asked and "values" in names:
            names["values"] = "values of the manifest"
        if self.is_uncompared:
            del names["values"]
            names["files"] = "files (sound and consistent)"
        return list(names.values())

    @property
    def _behaviour(self) -> list[str]:
        """The comparisons of the stage `behaviour`."""
        compared = self.facts.get(BEHAVIOUR) or ["output compared with transformers"]
        return list(dict.fromkeys(compared)) if BEHAVIOUR in self.asked else []

    def write(self, path: str | Path) -> None:
        """Writes the report to a file in the format of its suffix: .json, .html, .md, .sarif, or .xml (JUnit).

        Replaces an older report only. Raises CkptkitError for another suffix, a missing directory or a file that is
        not a report, and OSError if the file cannot be written.
        """
        import_module(_WRITERS).write_report(self, Path(path))

    def to_json(self) -> dict[str, Any]:
        """The report in the `ckptkit-report/2` format, which other programs depend on."""
        ended = Counter(check.status for check in self.checks)
        return {
            "schema": SCHEMA,
            "version": self.version,
            "command": list(self.command),
            "checkpoint": self.checkpoint,
            "source": self.source,
            "model": self.model,
            "date": self.date,
            "status": self.status,
            "reasons": list(self.reasons),
            "asked": list(self.asked),
            "not_asked": list(self.not_asked),
            "counts": {
                "checks": len(self.checks),
                **{status: ended[status] for status in get_args(Status)},
                "tensors_compared": sum(check.tensors_compared for check in self.checks),
                "bytes_compared": sum(check.bytes_compared for check in self.checks),
            },
            "checks": [check.to_json() for check in self.checks],
            "findings": [finding.to_json() for finding in self.findings],
            "facts": {key: list(values) for key, values in self.facts.items()},
            "heat": {layer: {kind: dict(cell) for kind, cell in cells.items()} for layer, cells in self.heat.items()},
        }


def split_reason(reason: str) -> tuple[str, str]:
    """Splits a reason into its text and the codes of its checks in short, or "" if it has no codes."""
    codes, _, why = reason.partition(": ")
    listed = codes.split(", ")
    return (why, short_codes(listed)) if all(map(_CODE.fullmatch, listed)) else (reason, "")


def short_codes(codes: Sequence[str]) -> str:
    """`CK501, CK502`, or `8 checks, CK201 to CK210` if there are many."""
    return ", ".join(codes) if len(codes) <= _CODES else f"{len(codes)} checks, {codes[0]} to {codes[-1]}"


def _listed(names: Sequence[str]) -> str:
    *most, last = names or [""]
    return f"{', '.join(most)} and {last}" if most else last


def anchors(findings: Sequence[Finding]) -> list[str]:
    """The name of each finding in every format: its code and its number within that code (`CK202-1`)."""
    counts: Counter[str] = Counter()
    names = []
    for finding in findings:
        counts[finding.code] += 1
        names.append(f"{finding.code}-{counts[finding.code]}")
    return names


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
