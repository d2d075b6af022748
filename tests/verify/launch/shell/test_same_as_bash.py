"""Scripts made by a grammar: our words are those that bash gives to the trainer, or not known; never others.

`CKPTKIT_CASES=10000` makes more of them, and prints how they come out.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.shell_grammar import Bash, script

CASES = int(os.environ.get("CKPTKIT_CASES", "500"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.timeout(max(600, CASES))
def test_words_are_those_of_bash_or_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bash = Bash(tmp_path)
    outcomes: Counter[str] = Counter()
    different: dict[int, str] = {}
    for number in range(CASES):
        outcome = bash.compared(script(number))
        outcomes[outcome.partition(":")[0]] += 1
        if outcome.startswith("differ"):
            different[number] = outcome
    print(dict(outcomes))
    assert not different
    assert min(outcomes["equal"] / CASES, 5 * outcomes["unresolved"] / CASES) > 0.5
