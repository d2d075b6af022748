"""MiniMax-M3 as transformers saves it, which is under the names of the release; the router stays float32 there."""

from __future__ import annotations

from typing import Any

import torch
from releases.record import load
from torch import Tensor
from transformers import AutoModelForImageTextToText, MiniMaxM3VLConfig

from families.case import SIZES, Case, biases_in_float32, random

FREQUENCY = [0, 0, 0, *[1] * 9]
TEXT: dict[str, Any] = load("MiniMaxAI/MiniMax-M3").config["text_config"]
# What transformers reads and does not write, and what it writes instead.
RELEASED: dict[str, Any] = {
    key: TEXT[key]
    for key in (
        *("hidden_act", "scoring_func", "use_routing_bias", "use_gemma_norm", "use_qk_norm", "qk_norm_type"),
        *("attention_output_gate", "n_shared_experts", "num_mtp_modules", "num_nextn_predict_layers"),
        *("rope_theta", "partial_rotary_factor", "sparse_attention_config"),
    )
}
RELEASED["moe_layer_freq"] = FREQUENCY
RELEASED["sparse_attention_config"] |= {"sparse_index_dim": 32, "sparse_num_index_heads": 2, "sparse_topk_blocks": 2}
RELEASED["sparse_attention_config"] |= {"sparse_block_size": 8, "sparse_disable_index_value": FREQUENCY}
RELEASED["sparse_attention_config"] |= {"sparse_attention_freq": FREQUENCY}
_OURS = ("index_block_size", "index_head_dim", "index_local_blocks", "index_n_heads", "index_topk_blocks")
_OURS += ("layer_types", "mlp_layer_types", "rope_parameters", "model_type")


def as_released(config: dict[str, Any]) -> dict[str, Any]:
    """config.json under the keys of the release."""
    stated = config["text_config"]
    text = {key: value for key, value in stated.items() if key not in _OURS}
    sparse = {
        "sparse_index_dim": stated["index_head_dim"],
        "sparse_num_index_heads": stated["index_n_heads"],
        "sparse_topk_blocks": stated["index_topk_blocks"],
        "sparse_block_size": stated["index_block_size"],
    }
    released = RELEASED | {"sparse_attention_config": RELEASED["sparse_attention_config"] | sparse}
    vision = config["vision_config"] | {"model_type": "clip_vision_model", "rope_theta": 10000.0, "rope_mode": "3d"}
    merge = {"image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"position_embedding_type": "rope", "vision_segment_max_frames": 4, "img_token_compression_config": merge}
    return config | {"text_config": text | released, "vision_config": vision, "img_token_compression_config": merge}


def value(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Routers in float32; norms are stored minus one."""
    if name.endswith("gate.weight"):
        return random(name, tensor, torch.float32)
    return random(name, tensor, dtype) - float("norm" in name and "vision" not in name)


def config() -> MiniMaxM3VLConfig:
    """Three dense layers without an indexer, and nine with experts and one."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    text = SIZES | {
        "intermediate_size": 96,
        "dense_intermediate_size": 288,
        "shared_intermediate_size": 96,
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "rotary_dim": 16,
        "bos_token_id": 1,
        "moe_layer_freq": FREQUENCY,
        "sparse_attention_config": RELEASED["sparse_attention_config"],
        "rope_parameters": rope,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 4,
    }
    return MiniMaxM3VLConfig(
        text_config=text, vision_config=vision, projector_hidden_size=36, image_token_index=350, video_token_index=351
    )


CASES = {
    "minimax_m3_vl": Case(
        config, edit=as_released, value=value, stored=biases_in_float32, auto=AutoModelForImageTextToText, fused=True
    )
}
