"""Writes a report as JSON, Markdown, JUnit, SARIF or HTML, by the suffix of the file's name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import json_text
from ckptkit.formats.detect import LOADED, MANIFEST
from ckptkit.storage.write import write_atomically
from ckptkit.verify.core.report import Report

__all__ = ["FORMATS", "fault_of", "report_text", "write_report"]
_BEGINNINGS = {  # the first bytes of a report in each format; `page.html` has them in a <meta>
    ".json": re.compile(rb'\{\s*"schema":\s*"ckptkit-report/'),
    ".md": re.compile(rb"# ckptkit: (PASSED|FAILED|INCONCLUSIVE)\b"),
    ".xml": re.compile(rb'<\?xml [^>]*>\s*<testsuites>\s*<testsuite name="ckptkit" '),
    ".sarif": re.compile(rb'\{\s*"\$schema":[^{]*\[\s*\{\s*"tool":\s*\{\s*"driver":\s*\{\s*"name":\s*"ckptkit"'),
    ".html": re.compile(rb'<!DOCTYPE html>[^\0]{0,1000}<meta name="generator" content="ckptkit-report/'),
}
FORMATS = tuple(_BEGINNINGS)
_READ = 4096  # bytes at the beginning of a file


def report_text(report: Report, ending: str) -> str:
    """The report in the format of one of `FORMATS`."""
    # Imported here so that the command line can import FORMATS without every check.
    from ckptkit.verify.reports import html, junit, markdown, sarif

    if ending == ".json":
        return json_text(report.to_json()) + "\n"
    writers = {".md": markdown.markdown, ".xml": junit.junit, ".sarif": sarif.sarif, ".html": html.html}
    return writers[ending](report)


def write_report(report: Report, path: Path) -> None:
    """Writes the report atomically, in the format of the suffix. Raises OSError, and CkptkitError as `fault_of`."""
    if (fault := fault_of(path)) is not None:
        raise CkptkitError(fault, "choose another file for the report")
    write_atomically(path, report_text(report, path.suffix))


def fault_of(path: Path) -> str | None:
    """The reason why no report can be written to `path`, or None. Raises OSError."""
    parent = path.absolute().parent
    if path.suffix not in _BEGINNINGS:
        return f"{path} does not end in one of {', '.join(FORMATS)}"
    if path.is_dir():
        return f"{path} is a directory"
    if not parent.is_dir():
        return f"{path} is in a directory that does not exist"
    if path.name in {*LOADED, MANIFEST}:
        return f"{path} has the name of a file that loaders read"
    if path.exists() and not _is_report(path):
        return f"{path} exists and is not a {path.suffix} report of ckptkit, so it is not replaced"
    return None if os.access(parent, os.W_OK) else f"{path} is in a directory that cannot be written to"


def _is_report(path: Path) -> bool:
    """Whether a file is empty or a report of ckptkit in the format of its suffix."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(_READ)
    return not beginning or _BEGINNINGS[path.suffix].match(beginning) is not None
