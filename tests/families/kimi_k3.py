"""Kimi K3, of which no released transformers has a class: the names, shapes and dtypes are those of its headers.

They are written down here by hand, in the sizes of the test model. Nothing computes its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from releases.record import load
from torch import Tensor
from transformers import PreTrainedModel

from families.by_name import BF16, F32, LATENT, Shapes, classes
from families.case import Case, random
from families.glm5_next import dense

# Layers counted from 1. The last two have latent attention both, as in the release.
KDA, FULL = [1, 2, 3, 5, 6, 7, 9, 10], [4, 8, 11, 12]
# The release's, with other sizes.
RELEASE = load("moonshotai/Kimi-K3").config
TEXT: dict[str, Any] = {
    key: one for key, one in RELEASE["text_config"].items() if key != "quantization_config"
} | LATENT
TEXT |= {"attn_res_block_size": 5, "num_experts": 12, "num_experts_per_token": 3, "qk_rope_head_dim": 16}
TEXT |= {"routed_expert_hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT["linear_attn_config"] |= {"full_attn_layers": FULL, "kda_layers": KDA, "head_dim": 4, "short_conv_kernel_size": 3}
VISION: dict[str, Any] = RELEASE["vision_config"] | {"init_pos_emb_height": 4, "init_pos_emb_width": 4}
VISION |= {"mm_hidden_size": 32, "qkv_hidden_size": 32, "text_hidden_size": 128, "vt_hidden_size": 32}
VISION |= {"vt_intermediate_size": 48, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2}


def config() -> Any:
    """As the release's config.json, with the sizes of the test model."""
    content = {"text_config": deepcopy(TEXT), "vision_config": dict(VISION)}
    content |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
    return CONFIG(architectures=["KimiK3ForConditionalGeneration"], **content)


def published() -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Every tensor of the language model: name, shape and dtype."""
    yield "lm_head.weight", (352, 128), BF16
    yield "model.embed_tokens.weight", (352, 128), BF16
    yield "model.norm.weight", (128,), BF16
    yield "model.output_attn_res_norm.weight", (128,), BF16
    yield "model.output_attn_res_proj.weight", (1, 128), BF16
    for layer in range(12):
        shapes = in_layer() | (kda() if layer + 1 in KDA else latent()) | (dense() if layer < 2 else experts())
        for name, (shape, dtype) in shapes.items():
            yield f"model.layers.{layer}.{name}", shape, dtype


def in_layer() -> Shapes:
    """The norms of a layer and what aggregates residuals, which every layer has."""
    return {
        "input_layernorm.weight": ((128,), BF16),
        "post_attention_layernorm.weight": ((128,), BF16),
        "self_attention_res_norm.weight": ((128,), BF16),
        "self_attention_res_proj.weight": ((1, 128), BF16),
        "mlp_res_norm.weight": ((128,), BF16),
        "mlp_res_proj.weight": ((1, 128), BF16),
    }


def kda() -> Shapes:
    """96 heads of 4. `A_log` has room for 128 heads."""
    return {
        "self_attn.A_log": ((128,), F32),
        "self_attn.dt_bias": ((384,), F32),
        "self_attn.b_proj.weight": ((96, 128), BF16),
        "self_attn.f_a_proj.weight": ((4, 128), BF16),
        "self_attn.f_b_proj.weight": ((384, 4), BF16),
        "self_attn.g_proj.weight": ((384, 128), BF16),
        **{f"self_attn.{part}_proj.weight": ((384, 128), BF16) for part in "qkv"},
        **{f"self_attn.{part}_conv1d.weight": ((384, 1, 3), F32) for part in "qkv"},
        "self_attn.o_norm.weight": ((4,), F32),
        "self_attn.o_proj.weight": ((128, 384), BF16),
    }


def latent() -> Shapes:
    """10 heads: 24 + 16 of a query or key, 20 of a value."""
    return {
        "self_attn.q_a_proj.weight": ((48, 128), BF16),
        "self_attn.q_a_layernorm.weight": ((48,), BF16),
        "self_attn.q_b_proj.weight": ((400, 48), BF16),
        "self_attn.kv_a_proj_with_mqa.weight": ((56, 128), BF16),
        "self_attn.kv_a_layernorm.weight": ((40,), BF16),
        "self_attn.kv_b_proj.weight": ((440, 40), BF16),
        "self_attn.g_proj.weight": ((200, 128), BF16),
        "self_attn.o_proj.weight": ((128, 200), BF16),
    }


def experts() -> Shapes:
    """12 experts in 64 of the 128 features, two shared ones in all of them."""
    block = "block_sparse_moe."
    found: Shapes = {
        f"{block}gate.weight": ((12, 128), BF16),
        f"{block}gate.e_score_correction_bias": ((12,), F32),
        f"{block}routed_expert_down_proj.weight": ((64, 128), BF16),
        f"{block}routed_expert_norm.weight": ((64,), BF16),
        f"{block}routed_expert_up_proj.weight": ((128, 64), BF16),
        f"{block}shared_experts.gate_proj.weight": ((192, 128), BF16),
        f"{block}shared_experts.up_proj.weight": ((192, 128), BF16),
        f"{block}shared_experts.down_proj.weight": ((128, 192), BF16),
    }
    for expert in range(12):
        found |= {f"{block}experts.{expert}.{name}.weight": ((96, 64), BF16) for name in ("w1", "w3")}
        found |= {f"{block}experts.{expert}.w2.weight": ((64, 96), BF16)}
    return found


CONFIG, MODEL = classes(
    "kimi_k3",
    "KimiK3ForConditionalGeneration",
    lambda config: ((f"language_model.{name}", shape, stored) for name, shape, stored in published()),
)


def value(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `random`. What is behind the 96 heads in `A_log` is 0."""
    result = random(name, tensor, dtype)
    if name.endswith("A_log"):
        result[96:] = 0
    return result


def vision(model: PreTrainedModel, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The vision tower and its projector, as SGLang 0.5.23 builds them of `VISION`."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (32, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (4, 4, 32),
        "vision_tower.encoder.final_layernorm.weight": (32,),
        "mm_projector.proj.0.weight": (128, 128),
        "mm_projector.proj.2.weight": (128, 128),
        "mm_projector.post_norm.weight": (128,),
    }
    for layer in range(2):
        block: dict[str, tuple[int, ...]] = dict.fromkeys(("norm0", "norm1"), (32,))
        block |= {"wqkv": (96, 32), "wo": (32, 32), "mlp.fc0": (48, 32), "mlp.fc1": (32, 48)}
        shapes |= {f"vision_tower.encoder.blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


CASES = {"kimi_k3": Case(config, added=vision, value=value, auto=MODEL)}
