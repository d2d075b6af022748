"""Small models for a live SGLang engine on GPUs, within the limits of its kernels."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from families import CASES
from families.case import save
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.run import verify
from support import trained

ALL = frozenset({"engine", "update", "release-resume", "logits"})
# Marlin needs out features % 64 == 0 and in features % 128 == 0.
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 4608,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
# Of latent attention, with one layer that is dense.
MLA = {
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# The same limits, smaller.
_SMALLER = {"vocab_size": 320, "num_hidden_layers": 5, "head_dim": 64, "max_position_embeddings": 256}
FOR_MARLIN = {**SIZES, **EXPERTS, **_SMALLER}
del FOR_MARLIN["tie_word_embeddings"]


def for_marlin(experts, **more):
    glm = {"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}
    return {
        "qwen3_moe": Qwen3MoeConfig(**FOR_MARLIN, num_experts=experts, norm_topk_prob=True),
        "glm4_moe": Glm4MoeConfig(**FOR_MARLIN, n_routed_experts=experts, **glm, **more),
    }


def model_of(family, config, sizes=SIZES, **more):
    return family, partial(config, **{**sizes, **more})


_TWO_OF_12 = {"head_dim": 64, "num_local_experts": 12, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
_GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "q_lora_rank": 96, "num_experts_per_tok": 4}
_WIDTHS = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
MODELS = {
    "dense": model_of("qwen3-untied", Qwen3Config, head_dim=64),
    "moe": model_of("qwen3_moe", Qwen3MoeConfig, **EXPERTS, head_dim=64, num_experts=16),
    "mla": model_of("deepseek_v3", DeepseekV3Config, **EXPERTS | MLA | _GROUPS),
    "glm": model_of(
        "glm4_moe-mtp",
        Glm4MoeConfig,
        **EXPERTS,
        head_dim=64,
        n_routed_experts=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "mixtral": model_of("mixtral", MixtralConfig, **_TWO_OF_12),
    "minimax": model_of("minimax_m2", MiniMaxM2Config, **_TWO_OF_12, bos_token_id=1, rope_parameters=_ROPE),
    # As SmolLM2-135M: groups of 32 divide its fused q, k and v, 960 rows of 576 columns, and no tile of a kernel does.
    "narrow": model_of("qwen3-untied", Qwen3Config, **_WIDTHS),
    "window": model_of("mistral", MistralConfig, head_dim=64, sliding_window=5),
}
ONLINE = ["lm_head", "model.embed_tokens"]
ATTENTION = r"re:.*\.self_attn\..*"
ROUTER = r"re:.*\.mlp\.gate$"


def saved(name, root):
    family, config = MODELS[name]
    save(name, replace(CASES[family], config=config), root / name, torch.bfloat16)
    return root / name


def verified(path, against=ALL, **sizes):
    """Where the variable OUT names a directory, the report is written there too."""
    report = verify(path, against=against, **sizes)
    if out := os.environ.get("OUT"):
        found = report.to_json()
        (Path(out) / f"{path.name}.json").write_text(json.dumps(found, indent=1))
    return report


TRAINED = "smollm2"  # the only one that was trained; tied, of 30 layers
SYNCED = ("dense", "moe", "mla", "int4", TRAINED)


def synced(name, root, reader):
    """A model whose weights are updated: `int4` is `moe` in INT4 for this engine, `TRAINED` was trained."""
    if name == TRAINED:
        return trained.save(trained.dense(), root / name, "dense")
    if name != "int4":
        return saved(name, root)
    quantize(
        saved("moe", root / "source"), root / name, QuantScheme(32, "qmax7", (ATTENTION, ROUTER)), readers=(reader,)
    )
    return root / name
