"""The examples of checks that the site shows beside those of mutations and symptoms (docs/site/pages.py).

The test that produces a finding calls `hold_example`. tests/test_check_examples.py holds that every example has one.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from pathlib import Path

from verify.report import Finding

ROOT = Path(__file__).resolve().parents[2]
# Cause, and what the tool then says.
EXAMPLES: Mapping[str, tuple[str, str]] = runpy.run_path(str(ROOT / "docs/site/pages.py"), run_name="pages")["EXAMPLES"]
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
_PATH = re.compile(r"/\S*/")


def hold_example(code: str, found: Finding | str) -> None:
    """Asserts that the example of a check is this finding, or this reason why the check is inconclusive.

    Numbers and the directories of paths may differ, and `…` is any text.
    """
    assert isinstance(found, str) or found.code == code
    said = f"inconclusive: {found}" if isinstance(found, str) else _said(found)
    shown = re.escape(_bare(EXAMPLES[code][1])).replace("…", ".*")
    assert re.fullmatch(shown, _bare(said)), said


def _said(found: Finding) -> str:
    about = f"{found.tensor}: " if found.tensor else ""
    return f"{about}expected {found.expected}; actual {found.actual}"


def _bare(text: str) -> str:
    return " ".join(_NUMBER.sub("#", _PATH.sub("", text)).split())
