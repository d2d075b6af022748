"""The report as SARIF 2.1.0 (https://docs.oasis-open.org/sarif/sarif/v2.1.0/), which code hosts show as annotations."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ckptkit.core.printable import json_text, printable
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.report import Finding, Report, anchors

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "%SRCROOT%"  # the root of the repository for GitHub and other hosts


def sarif(report: Report) -> str:
    """One run: a rule for each check that ran, a result for each finding, a notification for each skipped check."""
    known = {check.code: check for check in all_checks()}
    rules: list[dict[str, Any]] = []
    for result in report.checks:
        rules.append({"id": result.code, "shortDescription": {"text": result.title}})
        if (check := known.get(result.code)) is not None:
            markdown = f"**Why it matters**: {check.rationale}\n\n**What to do**: {check.fix}"
            rules[-1]["fullDescription"] = {"text": check.rationale}
            rules[-1]["help"] = {"text": f"{check.rationale}\n\n{check.fix}", "markdown": markdown}
    places = {check.code: index for index, check in enumerate(report.checks)}
    named = zip(anchors(report.findings), report.findings, strict=True)
    run = {
        "tool": {"driver": {"name": "ckptkit", "version": report.version, "rules": rules}},
        "invocations": [_invocation(report)],
        "results": [_result(anchor, finding, report, places) for anchor, finding in named],
        "properties": {"verdict": printable(report.verdict)},
    }
    return json_text({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


def _invocation(report: Report) -> dict[str, Any]:
    """Whether all requested checks ran, and notes on those that did not."""
    invocation: dict[str, Any] = {"executionSuccessful": not report.reasons}
    if report.command:
        invocation["arguments"] = [printable(word) for word in report.command[1:]]
    texts = (printable(f"not looked at: {reason}") for reason in report.reasons)
    notes: list[dict[str, Any]] = [{"level": "error", "message": {"text": text}} for text in texts]
    for check in (check for check in report.checks if check.status == "skipped"):
        message = {"text": printable(f"{check.code} was skipped: {check.reason}")}
        notes.append({"level": "note", "message": message, "associatedRule": {"id": check.code}})
    return invocation | ({"toolExecutionNotifications": notes} if notes else {})


def _result(anchor: str, finding: Finding, report: Report, places: dict[str, int]) -> dict[str, Any]:
    count = f" ({finding.count} tensors)" if finding.count > 1 else ""
    about = f"{finding.tensor}{count}: " if finding.tensor else ""
    rank = f" on rank {finding.rank}" if finding.rank else ""
    # Preflight reads several checkpoints; a finding about all of them belongs to the launch, or to the first.
    root = report.checkpoint.partition(", ")[0] if [*report.command[1:2]] == ["preflight"] else report.checkpoint
    file = finding.file or report.launch or root
    place: dict[str, Any] = {"artifactLocation": _artifact(file, Path.cwd())}
    line = re.search(rf"\b{re.escape(Path(file).name)}:(\d+)\b", finding.actual)
    if line or file == report.launch:  # hosts annotate a line of a script
        place["region"] = {"startLine": int(line[1]) if line else 1}
    location: dict[str, Any] = {"physicalLocation": place}
    if finding.tensor:
        location["logicalLocations"] = [{"fullyQualifiedName": printable(finding.tensor), "kind": "object"}]
    text = f"{about}expected {finding.expected}, found {finding.actual}{rank}. Next: {finding.hint}"
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": finding.severity,
        "message": {"text": printable(text)},
        "locations": [location],
        "properties": {"anchor": anchor, "count": finding.count} | ({"cause": finding.cause} if finding.cause else {}),
    }
    return result | ({"ruleIndex": places[finding.code]} if finding.code in places else {})


def _artifact(path: str, start: Path) -> dict[str, str]:
    """The path of a file relative to the git repository of `start` if it is inside, else a file URI."""
    absolute = Path(os.path.normpath(start / path))
    root = next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), None)
    if root is None or not absolute.is_relative_to(root):
        return {"uri": f"file://{_quoted(str(absolute))}"}
    return {"uri": _quoted(str(absolute.relative_to(root))), "uriBaseId": _ROOT}


def _quoted(path: str) -> str:
    return quote(path, safe="/", errors="backslashreplace")
