"""SGLang's own forward pass on the CPU against transformers' logits: SGLang puts tensors where it uses them.

As tests/gpu/test_sglang_logits_gpu.py, for what SGLang computes with torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support import sglang_cpu_logits
from support.logits import distance, saved_with_logits, sized
from support.nightly import collected, daily
from torch import Tensor

# SGLang's logits or its refusal, and transformers' logits in float32 and in bfloat16.
Answer = tuple[Tensor | str, Tensor, Tensor]
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

# Its class takes the hidden size divided by the heads for a head's size, whatever head_dim says.
FOUR_HEADS = "mixtral"
COMPUTED = (
    *("qwen2-untied", "qwen3-tied", "llama", "mistral", "glm4", "gemma3_text", "qwen2_5_vl", "qwen3_vl-tied"),
    *("qwen3_moe", "glm4_moe", "qwen3_vl_moe", "deepseek_v3", "moonlight", "glm4_moe_lite"),
    FOUR_HEADS,
)
DAILY = ("qwen3_moe", "deepseek_v3")
# What SGLang's class does not compute: biases of the MLP, which the witness names, and a window of Mistral's.
WITHOUT = ("llama-biases", "mistral-window")
# What needs a GPU: Triton kernels of linear attention, of Qwen2-MoE's shared expert and of MiniMax's norms; and sinks,
# which SGLang's torch attention does not know.
RAISED = {
    "qwen3_5": "There should only be one.",
    "qwen2_moe": "There should only be one.",
    "minimax_m2": "in rms_sumsq_serial",
    "gpt_oss": "got an unexpected keyword argument 'sinks'",
}


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """For each model: SGLang's logits or its refusal, and transformers' logits in float32 and in bfloat16."""
    root = tmp_path_factory.mktemp("logits")
    expected: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(collected(request, "name")):
        case = sized(name, {"num_attention_heads": 4} if name == FOUR_HEADS else {})
        expected[name] = saved_with_logits(name, case, root / "models" / name)
    found = sglang_cpu_logits.run(root / "models", root / "answers", root / "log")
    return {name: (found[name], *logits) for name, logits in expected.items()}


@pytest.mark.parametrize("name", daily(COMPUTED, DAILY))
def test_sglang_computes_the_logits_of_transformers(name: str, answers: Mapping[str, Answer]) -> None:
    """Not further from float32 than twice what transformers' own bfloat16 is, of logits that differ far more."""
    answer, exact, rounded = answers[name]
    assert isinstance(answer, Tensor), answer
    ours, noise = distance(answer, exact), distance(rounded, exact)
    assert ours <= 2 * noise
    assert ours <= exact.std() / 20


@pytest.mark.parametrize("name", daily(WITHOUT, WITHOUT[:1]))
def test_what_sglangs_class_leaves_out_shows_in_the_logits(name: str, answers: Mapping[str, Answer]) -> None:
    answer, exact, rounded = answers[name]
    assert isinstance(answer, Tensor), answer
    assert distance(answer, exact) > 20 * distance(rounded, exact)


@pytest.mark.parametrize("name", daily(RAISED, ("qwen3_5",)))
def test_what_needs_a_gpu_is_said(name: str, answers: Mapping[str, Answer]) -> None:
    assert RAISED[name] in str(answers[name][0])
