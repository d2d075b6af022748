"""lab/faults.md has the cells that are tested, and tests that exist."""

import json
import os
from pathlib import Path

from support import processes

from faults.table import parts, table


def test_the_page_has_every_cell_and_no_other():
    assert parts()[1] == table()


def test_names_that_are_no_utf8_in_a_locale_without_it_are_read_and_reported(converted, tmp_path):
    """As Python has it in a locale of ASCII or GB18030: UTF-8 mode off, streams that take no other character."""
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/model-\xff-\xe4\xb8\xad"))
    source.symlink_to(converted("qwen2-tied"))
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    reports = [tmp_path / f"report{ending}" for ending in (".json", ".html", ".md", ".xml", ".sarif")]
    asked = [word for report in reports for word in ("--report", report)]
    words = [word if isinstance(word, str) else os.fspath(word) for word in ("verify", source, *asked)]
    done = processes.ckptkit(*words, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(reports[0].read_text("utf-8"))["status"] == "passed"
    for report in reports:
        assert report.read_bytes().decode("utf-8")
