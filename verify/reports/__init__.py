"""A report as a file: JSON, Markdown, JUnit, SARIF or an HTML page, told by the ending of the file's name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from verify.report import Report

FORMATS = (".json", ".md", ".xml", ".sarif", ".html")


def fault_of(path: Path) -> str | None:
    """Why no report can be written to `path`, told before any work is done; None when one can."""
    parent = path.absolute().parent
    if path.suffix not in FORMATS:
        return f"{path}: must end in one of {', '.join(FORMATS)}"
    if path.is_dir():
        return f"{path}: is a directory"
    if not parent.is_dir():
        return f"{path}: must be in a directory that is there"
    return None if os.access(parent, os.W_OK) else f"{path}: its directory cannot be written to"


def text_of(report: Report, ending: str) -> str:
    """The report in the format of one of `FORMATS`."""
    return _writers()[ending](report)


def write_report(report: Report, path: Path) -> None:
    """Writes the report in the format that the ending of `path` says. A reader sees the file whole or not at all. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text_of(report, path.suffix), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _json(report: Report) -> str:
    return json.dumps(report.to_json(), indent=2) + "\n"


def _writers() -> Mapping[str, Callable[[Report], str]]:
    # Imported here so that the command line can ask for the endings without importing every check.
    from verify.reports import html, junit, markdown, sarif

    return {".json": _json, ".md": markdown.markdown, ".xml": junit.junit, ".sarif": sarif.sarif, ".html": html.html}
