"""SGLang's own forward pass against transformers' logits, family by family: SGLang puts tensors where it uses them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from families import HF_CASES
from support.logits import distance, saved_with_logits, sized, summary
from support.nightly import collected
from support.processes import run_logged
from torch import Tensor

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

# Processes at a time: each takes ten seconds to import SGLang, and little of the GPU.
AT_ONCE = 7
# Sizes that SGLang's kernels take: powers of two, and heads that its rotary kernel knows; and for classes that do not
# read head_dim, the hidden size divided by the heads.
SIZES = {
    "qwen3_moe": {"head_dim": 64},
    "mixtral": {"num_attention_heads": 4},
    "qwen2_moe": {"num_attention_heads": 4},
    "gpt_oss": {"num_experts_per_tok": 4},
    "gpt_oss-v4": {"num_experts_per_tok": 4},
    "qwen3_next": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "qwen3_5": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "qwen3_5_moe": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
}
# What SGLang's class does not compute: biases of the MLP, which the witness names, and windows of Mistral and Phi-3.
WITHOUT = ["llama-biases", "mistral-window", "phi3-tied-window"]
# Experts are chosen by softmax scores without their bias, for which SGLang's kernel has no argument: six times as far
# from float32 as transformers in bfloat16, and as far as transformers without the bias (lab/sglang-versions.md).
WITHOUT_BIAS = ["ernie4_5_moe"]
# What SGLang says where it does not build the model.
SAID = {
    "mimo": "does not recognize this architecture",
    "mimo-tied-two-layers": "does not recognize this architecture",
    "kimi_k25": "'KimiK25VisionConfig' object has no attribute 'vt_hidden_size'",
    "gemma3": "KeyError: 'vision_tower.embeddings.patch_embedding.weight'",
    "qwen3_5_text-tied": "Qwen3_5ForCausalLM has no SGlang implementation",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM has no SGlang implementation",
    "deepseek_v32": "assert index_head_dim == 128",
    "glm_moe_dsa": "assert index_head_dim == 128",
    "glm_moe_dsa-shared": "assert index_head_dim == 128",
    "exaone_moe": "'NoneType' object has no attribute 'type'",  # of Triton, in a window beside full attention
    "exaone_moe-groups-tied": "'NoneType' object has no attribute 'type'",
    "qwen3_omni_moe_thinker": "has no SGLang implementation, falling back to Transformers",
    "bailing_moe": "does not recognize this architecture",  # its config class comes with the release, as code
    "bailing_moe_v2-tied": "does not recognize this architecture",
    "nemotron_h": "does not support triton attention backend",
    "nemotron_h-latent": "does not support triton attention backend",
    # Of its own paths on a GPU, with small models or without the rest of an engine around the model.
    "deepseek_v4": "'TreeCacheNamespace' object has no attribute",
    "qwen2_moe-dense-between": "Error",  # without the layers that the witness names, whatever comes first
    "qwen3_moe-dense-between": "Error",
}
# Of which transformers has no class, or whose embeddings of each layer have fewer rows than the prompts take.
NOT_ASKED = [name for name in HF_CASES if name.startswith(("step3p", "kimi_k3", "glm5_next"))]
COMPUTED = [name for name in HF_CASES if name not in (*SAID, *WITHOUT, *WITHOUT_BIAS, *NOT_ASKED)]


@dataclass(frozen=True)
class Answer:
    logits: Tensor | None
    said: str = ""


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("logits")
    expected = {}
    names = [name for name in HF_CASES if name in collected(request, "name")]
    for name in names:
        expected[name] = saved_with_logits(name, sized(name, SIZES.get(name, {})), root / name)

    def ask(name):
        out, log = root / f"{name}.pt", root / f"{name}.log"
        ended = run_logged(log, "support.sglang_logits", root / name, out, gpu=True, limit_s=400)
        return Answer(torch.load(out) if ended and out.exists() else None, log.read_text(errors="replace")[-20_000:])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(names, pool.map(ask, names), strict=True))
    if out := os.environ.get("OUT"):
        rows = {name: (one.said if one.logits is None else one.logits, *expected[name]) for name, one in found.items()}
        (Path(out) / "logits.json").write_text(json.dumps(summary(rows), indent=1))
    return {name: (found[name], *expected[name]) for name in names}


def far(answer):
    """How far SGLang is from float32, how far transformers' own bfloat16, and how far logits are from their mean."""
    ours, exact, rounded = answer
    assert ours.logits is not None, ours.said
    return float(distance(ours.logits, exact)), float(distance(rounded, exact)), float(exact.std())


@pytest.mark.parametrize("name", COMPUTED)
def test_sglang_computes_the_logits_of_transformers(name, answers):
    ours, noise, spread = far(answers[name])
    assert ours <= 2 * noise
    assert ours <= spread / 10


@pytest.mark.parametrize("name", WITHOUT_BIAS)
def test_a_bias_that_is_left_out_shows_in_the_logits(name, answers):
    ours, noise, spread = far(answers[name])
    assert 4 * noise <= ours <= spread / 20


@pytest.mark.parametrize("name", WITHOUT)
def test_what_sglangs_class_leaves_out_shows_in_the_logits(name, answers):
    ours, noise, _ = far(answers[name])
    assert ours > 20 * noise


@pytest.mark.parametrize("name", SAID)
def test_what_sglang_refuses_is_quoted(name, answers):
    answer = answers[name][0]
    assert answer.logits is None
    assert SAID[name] in answer.said
