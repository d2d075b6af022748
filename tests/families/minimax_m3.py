"""MiniMax-M3 as transformers saves it, which is under the names of the release."""

from transformers import AutoModelForImageTextToText, MiniMaxM3VLConfig

from families.case import SIZES, Case


def config():
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
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 9,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 9,
        "index_n_heads": 2,
        "index_head_dim": 32,
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


CASES = {"minimax_m3_vl": Case(config, auto=AutoModelForImageTextToText, fused=True)}
