"""SGLang's own forward pass against transformers' logits, family by family: SGLang puts tensors where it uses them.

What `verify --against-sglang` cannot see, it takes from here: it follows every tensor into SGLang's parameters, and
these logits show that they are the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from families import HF_CASES
from support.logits import distance, saved_with_logits, sized
from support.nightly import collected
from support.processes import run_logged
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.sglang,
    pytest.mark.timeout(1500),
]

# Processes at a time: each takes ten seconds to import SGLang, and little of the GPU.
AT_ONCE = 7
# Sizes that SGLang's kernels take: powers of two, and heads that its rotary kernel knows; and for classes that do not
# read head_dim, the hidden size divided by the heads.
SIZES: Mapping[str, Mapping[str, int]] = {
    "qwen3_moe": {"head_dim": 64},
    "mixtral": {"num_attention_heads": 4},
    "qwen2_moe": {"num_attention_heads": 4},
    "gpt_oss": {"num_experts_per_tok": 4},
    "gpt_oss-v4": {"num_experts_per_tok": 4},
    "qwen3_next": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "qwen3_5": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "qwen3_5_moe": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
}
# What its class does not compute whole: biases of the MLP, windows, and the bias of ERNIE's router.
IN_PART = ("llama-biases", "mistral-window", "phi3-tied-window", "ernie4_5_moe")
# What SGLang does not build or run in this way: lab/sglang-versions.md.
REFUSED = (
    *("mimo", "mimo-tied-two-layers", "kimi_k25", "gemma3", "qwen3_5_text-tied", "qwen3_5_moe_text", "deepseek_v32"),
    *("glm_moe_dsa", "glm_moe_dsa-shared", "exaone_moe", "exaone_moe-groups-tied", "qwen3_omni_moe_thinker", "olmo3"),
    *("bailing_moe", "bailing_moe_v2-tied", "nemotron_h", "nemotron_h-latent", "olmo3-tied-window-everywhere"),
    *("deepseek_v4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "granitemoehybrid", "minimax_m3_vl"),
    *("qwen2_moe-dense-between", "qwen3_moe-dense-between"),
)
# Of which transformers has no class, or whose embeddings of each layer have fewer rows than the prompts take.
NOT_ASKED = [name for name in HF_CASES if name.startswith(("step3p", "gemma4-small", "kimi_k3", "glm5_next"))]
COMPUTED = [name for name in HF_CASES if name not in (*REFUSED, *IN_PART, *NOT_ASKED)]


@dataclass(frozen=True)
class Answer:
    """What SGLang computed, or what it printed last."""

    logits: Tensor | None
    said: str = ""


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Answer, Tensor, Tensor]]:
    """For each model: SGLang's answer, and transformers' logits in float32 and in bfloat16."""
    root = tmp_path_factory.mktemp("logits")
    expected: dict[str, tuple[Tensor, Tensor]] = {}
    names = [name for name in HF_CASES if name in collected(request, "name")]
    for name in names:
        expected[name] = saved_with_logits(name, sized(name, SIZES.get(name, {})), root / name)

    def ask(name: str) -> Answer:
        out, log = root / f"{name}.pt", root / f"{name}.log"
        ended = run_logged(log, "support.sglang_logits", root / name, out, gpu=True, limit_s=400)
        return Answer(torch.load(out) if ended and out.exists() else None, log.read_text(errors="replace")[-20_000:])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(names, pool.map(ask, names), strict=True))
    return {name: (found[name], *expected[name]) for name in names}


@pytest.mark.parametrize("name", COMPUTED)
def test_sglang_computes_the_logits_of_transformers(
    name: str, answers: Mapping[str, tuple[Answer, Tensor, Tensor]]
) -> None:
    """Not further from float32 than twice what transformers' own bfloat16 is, of logits that differ far more."""
    answer, exact, rounded = answers[name]
    assert answer.logits is not None, answer.said
    ours, noise = distance(answer.logits, exact), distance(rounded, exact)
    assert ours <= 2 * noise
    assert ours <= exact.std() / 10 or name == "gemma4"  # whose test model bfloat16 turns into another
