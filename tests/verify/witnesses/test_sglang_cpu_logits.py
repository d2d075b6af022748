"""SGLang's own forward pass on the CPU against transformers' logits: SGLang puts tensors where it uses them."""

import json

import pytest
from support import sglang_cpu_logits
from support.logits import distance, saved_with_logits, sized
from support.nightly import collected, daily
from support.sglang_cpu_families import COMPUTED, DAILY, LONGER_WINDOW, SIZES
from torch import Tensor

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("logits")
    expected = {}
    for name in sorted(collected(request, "name")):
        case = sized(name, SIZES.get(name, {}))
        expected[name] = saved_with_logits(name, case, root / "models" / name)
        if name in LONGER_WINDOW:
            file = root / "models" / name / "config.json"
            config = json.loads(file.read_text())
            file.write_text(json.dumps(config | {"sliding_window": config["sliding_window"] - 1}))
    found = sglang_cpu_logits.run([root / "models" / name for name in expected])
    return {name: (found[name], *logits) for name, logits in expected.items()}


@pytest.mark.parametrize("name", daily(COMPUTED, DAILY))
def test_sglang_computes_the_logits_of_transformers(name, answers):
    answer, exact, rounded = answers[name]
    assert isinstance(answer, Tensor), answer
    ours, noise = distance(answer, exact), distance(rounded, exact)
    assert ours <= 2 * noise
    assert ours <= exact.std() / 10
