"""Settings that change no tensor change logits: real Megatron agrees with transformers only if they are right.

Megatron runs on the CPU in one process and takes float32 weights by name. Positions go far enough for scaled rotary
frequencies to turn.
"""

from dataclasses import replace

import pytest
import torch
from families import CASES
from families.case import SIZES, Case, far, random, save
from families.gpt_oss import ROPE as GPT_OSS_ROPE
from families.gpt_oss import ROUNDED as GPT_OSS_ROUNDED
from support.installed import require_megatron
from support.megatron_runs import Case as Run
from support.megatron_runs import in_megatron, logits_of
from transformers import MixtralConfig

from ckptkit.formats.hf.reader import HfCheckpoint

require_megatron()

TOLERANCE = 1e-4
LENGTH = 512


def sharp(name, tensor, dtype):
    """As `random`, with attention far from uniform, so that positions matter."""
    return random(name, tensor, dtype) * (5 if "q_proj.weight" in name or "k_proj.weight" in name else 1)


def long(case):
    return replace(case, value=sharp)


SHARP = ("llama", "llama-tied", "mistral-window", "qwen2_moe", "minimax_m2", "exaone_moe-groups-tied")
MODELS = {name: long(CASES[name]) for name in SHARP}
MODELS["mixtral-window"] = long(
    Case(
        lambda: MixtralConfig(
            **SIZES | {"intermediate_size": 96}, num_local_experts=12, num_experts_per_tok=3, sliding_window=7
        )
    )
)
MODELS |= {"glm4-tied": long(CASES["glm4-tied"])} | {
    name: CASES[name] for name in ("gemma3_text-v4", "gpt_oss", "gpt_oss-v4", "qwen2-tied", "qwen3_moe", "glm4_moe")
}
# Label -> model and what config.json then says wrong.
WRONG = {
    "rotary dimensions": (
        "glm4_moe",
        {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    ),
    "rotary base of a dense model": (
        "qwen2-tied",
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    ),
    "router scale": ("glm4_moe", {"routed_scaling_factor": 1.0}),
    "top k": ("qwen3_moe", {"num_experts_per_tok": 2}),
    "router weights not normalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "norm epsilon": ("qwen2-tied", {"rms_norm_eps": 1e-3}),
    "rope scaling factor": ("llama", {"rope_scaling": {**CASES["llama"].config().rope_parameters, "factor": 32.0}}),
    "rope scaling left out": ("llama", {"rope_scaling": None}),
    "Megatron's default factor": ("llama-tied", {"rope_parameters": CASES["llama"].config().rope_parameters}),
    "window one longer": ("mistral-window", {"sliding_window": 6}),
    "window one shorter": ("mistral-window", {"sliding_window": 4}),
    "window left out": ("mistral-window", {"sliding_window": None}),
    "window of experts' model left out": ("mixtral-window", {"sliding_window": None}),
    "router normalization": ("qwen2_moe", {"norm_topk_prob": True}),
    "rotary part of a head": ("minimax_m2", {"rotary_dim": 32}),
    "rotary base": ("minimax_m2", {"rope_theta": 10000.0}),
    "interpolation left out": (
        "glm4-tied",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "base of layers with a window": ("gemma3_text-v4", {"rope_local_base_freq": 20000}),
    "base of full layers": ("gemma3_text-v4", {"rope_theta": 10000}),
    "scaling of full layers left out": ("gemma3_text-v4", {"rope_scaling": None}),
    "another layer full": ("gemma3_text-v4", {"sliding_window_pattern": 5}),
    "softmax scale of the head's size": ("gemma3_text-v4", {"query_pre_attn_scalar": 40}),
    "window as NVIDIA's GPT-OSS script counts it": ("gpt_oss", {"sliding_window": 8}),
    "original length as NVIDIA's GPT-OSS script has it": (
        "gpt_oss",
        {"rope_parameters": GPT_OSS_ROPE | {"original_max_position_embeddings": 131072}},
    ),
    "YaRN's range rounded": ("gpt_oss", {"rope_parameters": GPT_OSS_ROPE | {"truncate": True}}),
    "YaRN left out": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}),
    "windows in the other layers": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 6}),
    "rotary embedding in the other layers": (
        "exaone_moe-groups-tied",
        {"layer_types": ["sliding_attention", "full_attention"] * 6},
    ),
    "YaRN's magnitudes left out": (
        "gpt_oss-v4",
        {"rope_scaling": GPT_OSS_ROUNDED | {"mscale": None, "mscale_all_dim": None}},
    ),
}


def tokens():
    return torch.randint(0, SIZES["vocab_size"], (1, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    """Logits by case: `hf NAME` by transformers, everything else by Megatron."""
    root = tmp_path_factory.mktemp("settings")
    found = {}
    runs = {}
    for name, case in MODELS.items():
        model, _ = save(name, case, root / name, torch.float32)
        with torch.no_grad():
            found[f"hf {name}"] = model(tokens()).logits
        runs[name] = Run(HfCheckpoint(root / name).config, in_megatron(root / name))
    for label, (name, change) in WRONG.items():
        runs[label] = replace(runs[name], config={**runs[name].config, **change})
    return found | logits_of(runs, tokens())


@pytest.mark.parametrize("name", list(MODELS))
def test_megatron_computes_the_logits_of_transformers(logits, name):
    assert far(logits[name], logits[f"hf {name}"]) < TOLERANCE


@pytest.mark.parametrize("label", list(WRONG))
def test_wrong_setting_changes_the_logits(logits, label):
    assert far(logits[label], logits[f"hf {WRONG[label][0]}"]) > 10 * TOLERANCE
