"""Families with ordinary grouped-query attention: Llama, Mistral, Mixtral, Qwen2 MoE, Qwen3, MiniMax-M2, Phi, Seed."""

from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
)

from families.case import MOE, SIZES, Case

# transformers' Llama wants a hidden size that divides by the heads, even where head_dim says otherwise.
LLAMA = SIZES | {"num_attention_heads": 8, "head_dim": 40, "max_position_embeddings": 131072}
EXPERTS = {"num_local_experts": 12, "num_experts_per_tok": 3}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# YaRN starts from no fewer tokens than the tests have: beyond, queries are scaled by their position.
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "image_size": 16,
}


def mistral3():
    text = Ministral3Config(**SIZES, rope_parameters=dict(MINISTRAL_ROPE)).to_dict()
    return Mistral3Config(text_config=text, vision_config=dict(PIXTRAL), tie_word_embeddings=False)


def mistral_small():
    """As Mistral Small 3, but tied."""
    text = MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=True).to_dict()
    return Mistral3Config(text_config=text, vision_config=dict(PIXTRAL), tie_word_embeddings=True)


class Fp32RouterBias:
    """Makes the router's selection bias float32, as Megatron and SGLang hold it. transformers would round it."""

    @staticmethod
    def from_config(config, dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for module in model.modules():
            if isinstance(bias := getattr(module, "e_score_correction_bias", None), Tensor):
                module.e_score_correction_bias = bias.float()
        return model


def as_v4(config):
    """Rotary settings as transformers v4 spells them, and Llama's releases."""
    rope = dict(config.pop("rope_parameters"))
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    return config | {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope}


def without_head_dim(config):
    """As Llama 2 and 3 are released: a head is hidden_size / num_attention_heads wide."""
    return {key: value for key, value in config.items() if key != "head_dim"}


def as_minimax_releases(config):
    """config.json with the keys that MiniMax-M2.5 has and transformers' config class does not write."""
    fraction = config["rope_parameters"].pop("partial_rotary_factor")
    return as_v4(config) | {
        "attn_type_list": [1] * config["num_hidden_layers"],
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rotary_dim": int(fraction * config["head_dim"]),
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def minimax_m2():
    rope = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
    return MiniMaxM2Config(**SIZES | {"intermediate_size": 96, "bos_token_id": 1}, **EXPERTS, rope_parameters=rope)


def qwen2_moe(**more):
    return Qwen2MoeConfig(**SIZES, **MOE, num_experts=12, shared_expert_intermediate_size=72, **more)


CASES = {
    "llama": Case(lambda: LlamaConfig(**LLAMA, rope_parameters=dict(LLAMA3_ROPE)), edit=as_v4),
    "llama-tied": Case(
        lambda: LlamaConfig(
            **LLAMA | {"head_dim": 16}, rope_parameters=LLAMA3_ROPE | {"factor": 32.0}, tie_word_embeddings=True
        ),
        edit=without_head_dim,
    ),
    "llama-biases": Case(lambda: LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)),
    "mistral": Case(lambda: MistralConfig(**SIZES, sliding_window=None), edit=as_v4),
    "mistral-window": Case(lambda: MistralConfig(**SIZES, sliding_window=5)),
    "ministral3": Case(lambda: Ministral3Config(**SIZES, rope_parameters=dict(MINISTRAL_ROPE))),
    "ministral3-tied": Case(
        lambda: Ministral3Config(
            **SIZES, tie_word_embeddings=True, rope_parameters=MINISTRAL_ROPE | {"llama_4_scaling_beta": 0.7}
        )
    ),
    "mistral3": Case(mistral3, auto=AutoModelForImageTextToText),
    "mistral3-small-tied": Case(mistral_small, auto=AutoModelForImageTextToText),
    "mixtral": Case(lambda: MixtralConfig(**SIZES | {"intermediate_size": 96}, **EXPERTS)),
    "qwen2_moe": Case(qwen2_moe, fused=True),
    "qwen2_moe-dense-between": Case(lambda: qwen2_moe(norm_topk_prob=True, mlp_only_layers=[3], decoder_sparse_step=2)),
    "qwen3-tied": Case(lambda: Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen3-untied": Case(lambda: Qwen3Config(**SIZES, tie_word_embeddings=False)),
    "qwen3_moe-dense-between": Case(
        lambda: Qwen3MoeConfig(
            **SIZES, **MOE, num_experts=12, norm_topk_prob=False, mlp_only_layers=[2, 7], decoder_sparse_step=3
        )
    ),
    "phi3": Case(lambda: Phi3Config(**SIZES), edit=as_v4),
    "phi3-tied-window": Case(
        lambda: Phi3Config(
            **SIZES | {"num_attention_heads": 8, "head_dim": 24},
            sliding_window=5,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.75},
        )
    ),
    "seed_oss": Case(lambda: SeedOssConfig(**SIZES), edit=as_v4),
    "seed_oss-tied": Case(lambda: SeedOssConfig(**SIZES, tie_word_embeddings=True)),
    "minimax_m2": Case(minimax_m2, edit=as_minimax_releases, auto=Fp32RouterBias),
}
