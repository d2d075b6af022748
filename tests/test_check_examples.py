"""Every example of a check on the site is held against what the tool says, by the test that produces the finding."""

from __future__ import annotations

import re
from pathlib import Path

from support.check_examples import EXAMPLES

# Where the report that the check judges is written by hand: why no CPU, or no sound tool, gives one.
BY_HAND = {
    "CK403": "Megatron numbers its layers right",
    "CK404": "Megatron's ranks take all that they ask for",
    "CK506": "SGLang's kernels repack on a GPU only; the layout they should give is computed on the CPU",
    "CK511": "an engine runs on a GPU only, and answers with NaN only where it is broken",
}


def test_every_example_is_held_by_the_test_that_finds_it() -> None:
    tests = Path(__file__).resolve().parent
    held = {code for file in tests.rglob("test_*.py") for code in _held(file.read_text())}
    assert held == set(EXAMPLES)
    assert set(BY_HAND) < set(EXAMPLES)


def _held(text: str) -> set[str]:
    """The codes that a module holds, from a table too."""
    if "hold_example(code" in text:
        return set(re.findall(r'^    \("(CK\d+)", ', text, re.MULTILINE)) | set(
            re.findall(r'hold_example\("(CK\d+)"', text)
        )
    return set(re.findall(r'hold_example\("(CK\d+)"', text))
