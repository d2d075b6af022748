"""How each verb ends on standard error: with a closing line, or with none, and why.

The line has what standard output leaves out: the time, the next command, and under `--json` the counts in words.
Without a next command it is only for runs of a second and longer (`ckptkit.app.cli.status`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.progress import closing, size
from quant.selection.readers import ALL_READERS

if TYPE_CHECKING:
    from quant.lint.lint import LintReport
    from verify.report import Report

_DONE = "done"


def end(counts: str, as_json: bool, after: Sequence[str] = ()) -> None:
    """Ends a verb whose text says the `counts` itself. `after` are the words of the next command."""
    closing(counts if as_json else _DONE, shlex.join(["ckptkit", *after]) if after else None)


def end_report(report: Report, as_json: bool, files: Sequence[Path]) -> None:
    """Ends `verify` and `preflight`, which wrote the report to `files`."""
    from verify.reports.text import groups, totals

    lines = [totals(report)] if as_json else []
    lines += [f"report in {', '.join(map(str, files))}"] if files else []
    # The text has the counts and this command.
    after = f"ckptkit explain {groups(report, 1)[0].code}" if as_json and report.findings else None
    closing("; ".join(lines) or _DONE, after)


def reader_words(readers: Iterable[str]) -> list[str]:
    """The options of the next command that name the same readers."""
    return [word for reader in readers for word in ("--reader", reader)]


def end_lint(report: LintReport, readers: Sequence[str], as_json: bool) -> None:
    """Ends `lint`, which was given these readers."""
    after: list[str] = []
    if report.fixed:
        known = reader_words(reader for reader in readers if reader in ALL_READERS)
        after = ["verify", report.path, *known] if any(Path(report.path).glob("*.safetensors")) else []
    elif report.findings and report.portable not in (None, tuple(report.patterns)):
        after = ["lint", report.path, *reader_words(readers), "--fix"]
    end(f"{report.packed} of {report.tensors} matrices are INT4", as_json, after)


def end_manifest(target: Path) -> None:
    """Ends `manifest`, which wrote the file `target`."""
    from ckptkit.core.specs import TensorSpec
    from ckptkit.transfer.manifest import read_manifest

    tensors = read_manifest(target).tensors
    nbytes = sum(TensorSpec(name, one.shape, one.dtype).nbytes for name, one in tensors.items())
    after = ["ckptkit", "verify", "COPY", "--manifest", str(target)]
    closing(f"digested {len(tensors)} tensors, {size(nbytes)}", shlex.join(after))
