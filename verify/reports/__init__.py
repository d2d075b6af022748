"""A report as a file: JSON, Markdown, JUnit, SARIF or an HTML page, told by the ending of the file's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import json_text
from ckptkit.storage.whole import write_whole
from verify.report import Report
from verify.reports.destination import FORMATS, fault_of

__all__ = ["FORMATS", "fault_of", "text_of", "write_report"]


def text_of(report: Report, ending: str) -> str:
    """The report in the format of one of `FORMATS`."""
    return _writers()[ending](report)


def write_report(report: Report, path: Path) -> None:
    """Writes the report in the format that the ending of `path` says. A reader sees the file whole or not at all.

    Raises CkptkitError where `fault_of` says why not, since something else may have come there meanwhile, and OSError.
    """
    if (fault := fault_of(path)) is not None:
        raise CkptkitError(fault, "name another file for the report")
    write_whole(path, text_of(report, path.suffix))


def _json(report: Report) -> str:
    return json_text(report.to_json()) + "\n"


def _writers() -> Mapping[str, Callable[[Report], str]]:
    # Imported here so that the command line can ask for the endings without importing every check.
    from verify.reports import html, junit, markdown, sarif

    return {".json": _json, ".md": markdown.markdown, ".xml": junit.junit, ".sarif": sarif.sarif, ".html": html.html}
