"""Hydra's own composition of overrides, against the settings that preflight reads.

`CKPTKIT_CASES=10000` makes more of them, a thousand a test. The first 300 also stand in `hydra_composed.json`, as Hydra
has them.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from support.hydra_grammar import ENVIRONMENT, FILE, compared, overrides

from interop import beside

pytestmark = pytest.mark.interop
CASES = int(os.environ.get("CKPTKIT_CASES", "300"))
A_TEST = 1000
KEPT = Path(__file__).parents[1] / "verify" / "launch" / "settings" / "hydra_composed.json"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, CASES, A_TEST))
def test_settings_are_those_of_hydra_or_not_known(tmp_path, first):
    cases = [overrides(number) for number in range(first, min(first + A_TEST, CASES))]
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in [FILE, *cases]))
    composed = [json.loads(line) for line in beside.start("hydra_compose", str(file), **ENVIRONMENT).splitlines()]
    assert len(composed) == len(cases)
    outcomes = [compared(words, one) for words, one in zip(cases, composed, strict=True)]
    print(dict(Counter(outcome.partition(":")[0] for outcome in outcomes)))
    assert [pair for pair in zip(cases, outcomes, strict=True) if pair[1].startswith("differ")] == []
    if not first:
        assert composed[:300] == json.loads(KEPT.read_text())[: len(composed)]
