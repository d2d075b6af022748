"""Overrides made by a grammar: the settings that we read are those that Hydra composed, or not known; never others.

`hydra_composed.json` has what Hydra 1.3.8 with OmegaConf 2.3.1 made of them: `make test-interop TOOL=hydra` compares
it with Hydra itself, which wants another version of ANTLR than the tests' S3 server.
"""

import json
from collections import Counter
from pathlib import Path

from support.hydra_grammar import compared, overrides

COMPOSED = json.loads(Path(__file__).with_name("hydra_composed.json").read_text())


def test_settings_are_those_of_hydra_or_not_known():
    outcomes = [compared(overrides(number), composed) for number, composed in enumerate(COMPOSED)]
    assert [(overrides(number), one) for number, one in enumerate(outcomes) if one.startswith("differ")] == []
    counts = Counter(outcomes)
    assert len(COMPOSED) == 300
    assert min(counts["equal"], counts["unresolved"], counts["refused"]) > 40
