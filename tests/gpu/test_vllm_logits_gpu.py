"""vLLM's own forward pass on a GPU against transformers' log-probabilities: each model type, and after repacking."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import HF_CASES
from families.case import tokens
from support.logits import distance, saved_with_logits, sized, summary
from support.nightly import collected
from support.processes import ckptkit
from support.vllm_cpu_families import write_code
from support.vllm_formats import CLEAN, FP8, MISORDERED, REFUSED, write_all
from support.vllm_logits import Asked, answers
from torch import Tensor
from transformers import AutoModelForCausalLM

from ckptkit.verify.witnesses.process.interpreter import python_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

# Sizes that vLLM's kernels take: of heads, and powers of two. Its class for Qwen2 does not read head_dim.
FOUR_HEADS = {"num_attention_heads": 4}
LINEAR = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32}
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_head_dim": 192,  # this and the next are what configs make of them
    "head_dim": 64,
}
OF_32 = {"head_dim": 32}
# As the releases have them.
LONG = {"max_position_embeddings": 4096}
MIXER = LONG | {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "chunk_size": 128}
# vLLM takes the original positions times the factor for all there are.
ROPES = HF_CASES["deepseek_v4"].config().rope_parameters
COMPRESSED = {
    "rope_parameters": {**ROPES, "compress": {**ROPES["compress"], "original_max_position_embeddings": 1024}},
    "hidden_size": 512,
    "num_attention_heads": 8,
    "o_groups": 2,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "index_n_heads": 64,
    "index_topk": 512,
    "sliding_window": 128,
}
SIZES = {
    **dict.fromkeys(("qwen2-tied", "qwen2-untied", "qwen2_moe"), FOUR_HEADS),
    **dict.fromkeys(("llama", "llama-biases", "gemma3_text", "gemma3_text-v4"), OF_32),
    "llama-tied": FOUR_HEADS | OF_32,  # its config states no head_dim
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), LINEAR),
    **dict.fromkeys(("deepseek_v3", "moonlight", "kimi_k2", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("nemotron_h", "nemotron_h-latent"), MIXER),
    "deepseek_v4": COMPRESSED,
}
FAMILIES = (
    *("qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "llama", "llama-tied", "llama-biases", "mistral"),
    *("mistral-window", "glm4", "glm4-tied", "gemma3_text", "gemma3_text-v4", "qwen3_vl-tied"),
    *("qwen3_moe", "qwen3_moe-dense-between", "qwen2_moe", "mixtral", "glm4_moe", "glm4_moe-mtp", "minimax_m2"),
    *("deepseek_v3", "moonlight", "kimi_k2", "glm4_moe_lite", "gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("exaone_moe", "exaone_moe-groups-tied", "bailing_moe_v2-tied", "qwen3_omni_moe"),
    *("nemotron_h", "nemotron_h-latent"),
    # No released Megatron loads these.
    "ernie4_5_moe",
)
LING = "bailing_moe"  # with a draft layer
# Its kernels multiply FP8 alone, with a cache in FP8.
IN_FP8 = ("deepseek_v4",)
# Prompts are longer than a chunk of a mixer, than the blocks and than the compressed keys that are chosen from.
# Gemma 4's test model is another one in bfloat16.
ASKED = {
    **dict.fromkeys(("nemotron_h", "nemotron_h-latent"), Asked(length=300)),
    "deepseek_v4": Asked({"kv_cache_dtype": "fp8", "block_size": 256, "kv_cache_memory_bytes": 1 << 30}, 2200),
}
PLAIN = [label for label in CLEAN if label.endswith("BF16")]
PACKED = [label for label in CLEAN if label not in PLAIN]


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("logits")
    expected = {}
    paths = {}
    asked = collected(request, "name") | collected(request, "label")
    for name in (name for name in (*FAMILIES, LING, *IN_FP8) if name in asked):
        paths[name], expected[name] = saved(name, root)
    labels = [label for label in (*CLEAN, *MISORDERED, *REFUSED) if label in asked]
    paths |= write_all(root / "formats", labels, root / "meant")
    for label in labels:
        expected[label] = logits_of(paths[label] if label in PLAIN else root / "meant" / label)
    (root / "answers").mkdir()
    got = answers(paths, root / "answers", "bfloat16", program=python_of("vllm", {}), gpu=True, asked=ASKED)
    found = {name: (got[name], *(torch.log_softmax(one, -1) for one in expected[name])) for name in paths}
    if out := os.environ.get("OUT"):
        (Path(out) / f"vllm_logits_{os.getpid()}.json").write_text(json.dumps(summary(found), indent=1))
    return found


def saved(name, root):
    case, path = sized(name, SIZES.get(name, {})), root / name
    if name in IN_FP8:
        case = replace(case, value=exact_in_fp8(case.value))
    expected = saved_with_logits(name, case, path, ASKED.get(name, Asked()).length)
    write_code(name, path)
    if name not in IN_FP8:
        return path, expected
    packed = root / f"{name} in FP8"
    if (done := ckptkit("quantize", path, packed, "--scheme", "fp8-block")).returncode:
        raise RuntimeError(done.stderr[-2000:])
    return packed, expected


def exact_in_fp8(value):
    """The same values, with matrices that blocks of 128 x 128 in FP8 hold exactly: their scales are powers of two."""

    def rounded(name, tensor, dtype):
        found = value(name, tensor, dtype)
        if found.dtype != torch.bfloat16 or found.dim() < 2:
            return found
        codes = (found.float() * 4096).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        codes[..., ::128, ::128] = 448
        return (codes / 4096).to(dtype)

    return rounded


def logits_of(path):
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        with torch.no_grad():
            found.append(model(tokens()).logits.float())
    return found[0], found[1]


def is_near(row, times, part=10):
    answer, exact, rounded = row
    assert isinstance(answer, Tensor), answer
    ours, noise = distance(answer, exact), distance(rounded, exact)
    assert ours <= times * noise
    assert ours <= exact.std() / part


@pytest.mark.parametrize("name", [*FAMILIES, *PLAIN])
def test_vllm_computes_the_log_probabilities_of_transformers(name, rows):
    is_near(rows[name], 2)


@pytest.mark.parametrize("label", [label for label in PACKED if not label.endswith(FP8)])
def test_packed_weights_compute_what_they_stand_for(label, rows):
    """Machete multiplies zero points by scales in bfloat16 before it subtracts them, which rounds once more."""
    is_near(rows[label], 3 if label.endswith("zero points") else 2)


@pytest.mark.parametrize("label", [*(label for label in PACKED if label.endswith(FP8)), *IN_FP8])
def test_fp8_computes_what_it_stands_for(label, rows):
    """Activations are rounded to FP8 too, of three bits behind the point where bfloat16 has seven: 16 times the noise.

    Errors of single products are not alike, so that much less is left of it.
    """
    is_near(rows[label], 16, 8)


@pytest.mark.parametrize("label", MISORDERED)
def test_misordered_scales_show_in_the_log_probabilities(label, rows):
    """So CK526 is right to name them."""
    answer, exact, rounded = rows[label]
    assert isinstance(answer, Tensor), answer
    assert distance(answer, exact) > 4 * distance(rounded, exact)


@pytest.mark.parametrize("name", [LING])
def test_vllms_class_of_ling_ends_at_its_draft_layer(name, rows):
    assert "There is no module or parameter named 'layers.12' in BailingMoeModel" in str(rows[name][0])


@pytest.mark.parametrize("label", REFUSED)
def test_what_vllm_refuses_is_not_served(label, rows):
    assert "'>' not supported between instances of 'NoneType' and 'int'" in str(rows[label][0])
