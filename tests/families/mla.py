"""Families with latent attention: DeepSeek V3, Moonlight, Kimi K2 and K2.5, GLM-4.7-Flash."""

import torch
from transformers import DeepseekV3Config, Glm4MoeLiteConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer

from families.case import SIZES, Case, random
from families.gqa import Fp32RouterBias
from families.mtp import added_layer, reference

# No two of heads x head sizes, ranks, hidden size and MLP sizes are equal. transformers always gives the norms of
# compressed queries and keys an epsilon of 1e-6, Megatron and SGLang that of the config.
MLA = {key: value for key, value in SIZES.items() if key != "head_dim"} | {
    "num_key_value_heads": 10,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 96,
    "n_routed_experts": 12,
}
UNGROUPED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
DEEPSEEK_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
NO_MTP = {"num_nextn_predict_layers": 0}  # newer transformers would promise one layer
# The slope between fast and slow frequencies covers dimensions 2 to 7 of 8, and every number moves it.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.5,
    "mscale_all_dim": 0.7,
}
KIMI_YARN = YARN | {
    "rope_theta": 50000.0,
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def stronger(name, tensor):
    """Makes attention far from uniform, so that rotary embedding and softmax scale matter, and experts unlike."""
    factor = 5 if ".self_attn." in name or name.endswith(".gate.weight") else 2 if ".mlp." in name else 1
    return tensor * factor if tensor.dim() > 1 else tensor


def strong(name, tensor, dtype):
    return stronger(name, random(name, tensor, dtype))


def deepseek():
    """Every kind of layer of DeepSeek V3; four groups of three experts."""
    sizes = MLA | {"max_position_embeddings": 4096, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    return DeepseekV3Config(
        **sizes, n_shared_experts=1, first_k_dense_replace=3, routed_scaling_factor=2.5, rope_parameters=YARN
    )


def plain(**sizes):
    """Moonlight and Kimi K2: one dense layer, no groups and no MTP layer."""
    return DeepseekV3Config(**MLA | UNGROUPED | NO_MTP | {"first_k_dense_replace": 1} | sizes)


def moonlight():
    """Queries that are not compressed, plain rotary embedding, two shared experts."""
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    return plain(q_lora_rank=None, n_shared_experts=2, routed_scaling_factor=2.446, rope_parameters=rope)


def kimi():
    """Kimi K2's yarn, which has no slope between fast and slow frequencies."""
    sizes = {"max_position_embeddings": 16384, "n_shared_experts": 1, "routed_scaling_factor": 2.827}
    return plain(**sizes, rope_parameters=KIMI_YARN)


def glm():
    return Glm4MoeLiteConfig(
        **MLA, **UNGROUPED, n_shared_experts=1, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )


def glm_layer(config, number):
    """Its kinds of layers are listed without the MTP layer, which is like the last."""
    return Glm4MoeLiteDecoderLayer(config, number - 1)


def rotary_frequencies(model, dtype):
    """Moonlight and Kimi K2 ship these in float32."""
    return {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": model.model.rotary_emb.inv_freq.float()
        for layer in range(12)
    }


def vision(model, dtype):
    """A few tensors of Kimi K2.5's vision tower and projector."""
    shapes = {
        "vision_tower.encoder.blocks.0.wqkv.weight": (96, 32),
        "vision_tower.patch_embed.pos_emb.weight": (4, 4, 32),
        "mm_projector.proj.0.bias": (64,),
    }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def as_v4(config):
    """Rotary settings as the releases spell them, which transformers v4 wrote."""
    rope = dict(config.pop("rope_parameters"))
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    return config | {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope | {"type": kind}}


def as_k25(config):
    """The language model's config inside that of a multimodal model."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": as_v4(config) | DEEPSEEK_ROUTER | {"model_type": "kimi_k2"},
    }


CASES = {
    "deepseek_v3": Case(
        deepseek,
        added=added_layer(DeepseekV3DecoderLayer, change=stronger),
        edit=lambda config: config | DEEPSEEK_ROUTER | {"num_nextn_predict_layers": 1},
        value=strong,
        auto=Fp32RouterBias,
        mtp=reference(DeepseekV3DecoderLayer),
    ),
    "moonlight": Case(
        moonlight,
        added=rotary_frequencies,
        edit=lambda config: as_v4(config) | DEEPSEEK_ROUTER,
        value=strong,
        auto=Fp32RouterBias,
        fused=True,
        # From 0.19 on Megatron puts a norm before linear_q_proj, which the model has not.
        before=(0, 19),
    ),
    "kimi_k2": Case(
        kimi,
        added=rotary_frequencies,
        edit=lambda config: as_v4(config) | DEEPSEEK_ROUTER | {"model_type": "kimi_k2"},
        value=strong,
        auto=Fp32RouterBias,
        witness="transformers' DeepSeek V3, of which it is a copy",
    ),
    "kimi_k25": Case(
        kimi,
        added=vision,
        edit=as_k25,
        value=strong,
        auto=Fp32RouterBias,
        prefix="language_model.",
        witness="transformers' DeepSeek V3 for the language model; the vision tower is carried",
    ),
    "glm4_moe_lite": Case(
        glm,
        added=added_layer(glm_layer, change=stronger),
        edit=lambda config: config | {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1},
        value=strong,
        auto=Fp32RouterBias,
        mtp=reference(glm_layer),
    ),
}
