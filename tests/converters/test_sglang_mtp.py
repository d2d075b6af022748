"""The order in which an MTP layer joins its two inputs: SGLang's own classes compute what the reference computes.

The reference is what Megatron is held against in test_families.py, and shows there when the two inputs change places.
"""

from dataclasses import replace

import pytest
import torch
from families import CASES
from families.case import build, tokens
from families.mtp import next_tokens
from support import sglang_mtp
from support.installed import before
from torch import nn

pytestmark = [pytest.mark.sglang, before("sglang", (0, 5, 23), "its layers are called with other arguments")]

# Each test model, and the name of SGLang's class in sglang_mtp.
MODELS = {"glm4_moe-mtp": "glm4_moe", "mimo": "mimo", "qwen3_next": "qwen3_next", "qwen3_5": "qwen3_5"}
QWEN = ("qwen3_next", "qwen3_5")


@pytest.fixture(scope="module")
def distances():
    """Relative error of the logits of SGLang's layer; NAME/swapped is with the halves of `mtp.fc` swapped."""
    jobs, heads, expected = {}, {}, {}
    for name, model in MODELS.items():
        jobs[name], heads[name], expected[name] = _job(name, model)
        if name in QWEN:
            fc = jobs[name].tensors["mtp.fc.weight"]
            jobs[f"{name}/swapped"] = replace(
                jobs[name], tensors={**jobs[name].tensors, "mtp.fc.weight": fc.roll(fc.shape[0], dims=1)}
            )
    found = {}
    for name, output in zip(jobs, sglang_mtp.run(list(jobs.values())), strict=True):
        model = name.removesuffix("/swapped")
        logits = nn.functional.linear(output, heads[model])
        found[name] = float((logits - expected[model]).abs().max() / expected[model].abs().max())
    return found


def _job(name, model):
    case = CASES[name]
    hf = build(name, case, torch.float32)
    added = case.added(hf, torch.float32)
    language = getattr(hf.model, "language_model", hf.model)
    with torch.no_grad():
        hidden, embedded = (
            language(input_ids=tokens()).last_hidden_state[0],
            language.embed_tokens(next_tokens(tokens()))[0],
        )
        return (
            sglang_mtp.Job(model, hf.config, dict(added), embedded, hidden),
            hf.lm_head.weight.detach(),
            case.mtp(hf, added, tokens())[0],
        )


@pytest.mark.parametrize("name", MODELS)
def test_sglangs_own_class_computes_the_logits_of_the_reference(distances, name):
    assert distances[name] < 1e-4


@pytest.mark.parametrize("name", QWEN)
def test_swapped_halves_are_another_model(distances, name):
    """slime swaps the halves of qwen3_next's `fc`."""
    assert distances[f"{name}/swapped"] > 1e-1
