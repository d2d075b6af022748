"""Training arguments in common.pt of a Megatron checkpoint: one that belongs to another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mutations.edits import edit_common, edit_json
from mutations.mutation import Damage, Mutation

QWEN, QWEN3, GLM, DEEPSEEK = "qwen2/megatron", "qwen3_moe/megatron", "glm4_moe/megatron", "deepseek_v3/megatron"


def argument(name: str, value: Any) -> Damage:
    """One stored argument has another value."""

    def damage(path: Path, place: str) -> None:
        edit_common(path, lambda common: setattr(common["args"], name, value))

    return damage


def _of(
    name: str,
    argument_name: str,
    value: Any,
    imitates: str,
    models: tuple[str, ...],
    modes: tuple[str, ...] = ("F5",),
    *references: str,
) -> Mutation:
    damage, on = argument(argument_name, value), dict.fromkeys(models, argument_name)
    return Mutation(name, imitates, modes, "CK701", damage, on, references)


def hf_config(**values: Any) -> Damage:
    """config.json beside the Megatron checkpoint is changed."""

    def damage(path: Path, place: str) -> None:
        edit_json(path / "hf" / "config.json", lambda config: config.update(values))

    return damage


_SCRIPT = "a launch script of a sibling"
_OPTION = "an option was left out of the launch script"

MUTATIONS = (
    _of("training without rotary base", "rotary_base", 500000, _SCRIPT, (QWEN, GLM), ("F5", "F18")),
    _of("training with another rotary share", "rotary_percent", 1.0, _OPTION, (GLM,), ("F5", "F18")),
    _of("training with another epsilon", "norm_epsilon", 1e-3, _SCRIPT, (QWEN, DEEPSEEK)),
    _of("training with other heads", "num_attention_heads", 8, _SCRIPT, (QWEN,), ("F5", "F25")),
    Mutation(
        "training without grouped attention",
        _OPTION,
        ("F5", "F25"),
        "CK701",
        argument("group_query_attention", False),
        {GLM: "num_query_groups"},
    ),
    _of("training with other head size", "kv_channels", 64, _SCRIPT, (QWEN3,), ("F5", "F25")),
    _of("training with another MLP size", "ffn_hidden_size", 512, _SCRIPT, (QWEN,)),
    _of("training with another expert size", "moe_ffn_hidden_size", 64, _SCRIPT, (GLM, DEEPSEEK)),
    _of("training without shared experts", "moe_shared_expert_intermediate_size", None, _OPTION, (GLM,)),
    _of("training with another top-k", "moe_router_topk", 2, _SCRIPT, (QWEN3, GLM)),
    _of("training with softmax scores", "moe_router_score_function", "softmax", _OPTION, (GLM, DEEPSEEK)),
    _of("training without routed scaling", "moe_router_topk_scaling_factor", None, _OPTION, (GLM, DEEPSEEK)),
    _of("training without expert bias", "moe_router_enable_expert_bias", False, _OPTION, (DEEPSEEK,), ("F5", "F9")),
    _of("training with other expert groups", "moe_router_num_groups", None, _OPTION, (DEEPSEEK,)),
    _of(
        "training with dense layers elsewhere",
        "moe_layer_freq",
        [0] + [1] * 11,
        _SCRIPT,
        (GLM, DEEPSEEK),
        ("F5",),
        "slime#1059",
    ),
    _of("training without query and key norms", "qk_layernorm", False, _OPTION, (QWEN3,)),
    _of("training without attention biases", "add_qkv_bias", False, _OPTION, (QWEN,)),
    _of("training with biases everywhere", "add_bias_linear", True, _OPTION, (QWEN,)),
    _of("training with another norm", "normalization", "LayerNorm", _OPTION, (QWEN,)),
    _of("training without SwiGLU", "swiglu", False, _OPTION, (QWEN,)),
    _of("training with another latent rank", "kv_lora_rank", 512, _SCRIPT, (DEEPSEEK,)),
    _of(
        "training with plain rotary embedding",
        "rotary_scaling_factor",
        1.0,
        _OPTION,
        (DEEPSEEK,),
        ("F5", "F18"),
        "miles#2377",
    ),
    _of("training with another mscale", "mscale_all_dim", 0.0, _OPTION, (DEEPSEEK,), ("F5", "F18"), "miles#2377"),
    _of(
        "export cuts the vocabulary",
        "vocab_size",
        340,
        "the tokenizer's size was stored as the model's",
        (QWEN, GLM),
        ("F23",),
    ),
    Mutation(
        "training with a layer less",
        _SCRIPT,
        ("F5",),
        "CK114",
        argument("num_layers", 11),
        {QWEN: "decoder.layers.11.*", GLM: "decoder.layers.11.*"},
        ("slime#1059", "Megatron-LM#1778"),
    ),
    Mutation(
        "training without the MTP layer",
        "mtp_num_layers was overwritten",
        ("F6",),
        "CK114",
        argument("mtp_num_layers", None),
        {GLM: "mtp.layers.0.*", DEEPSEEK: "mtp.layers.0.*"},
        ("Megatron-Bridge#4960",),
    ),
    Mutation(
        "training with more experts",
        _SCRIPT,
        ("F5", "F8"),
        "CK114",
        argument("num_experts", 16),
        {QWEN3: "experts.{12..15}.linear_fc1.weight", GLM: "experts.{12..15}.linear_fc1.weight"},
    ),
    Mutation(
        "training with tied embeddings",
        _OPTION,
        ("F19",),
        "CK114",
        argument("untie_embeddings_and_output_weights", False),
        {GLM: "output_layer.weight"},
        ("Megatron-Bridge#4883",),
    ),
    Mutation(
        "training with a larger vocabulary",
        "tokens were added after the save",
        ("F23",),
        "CK114",
        argument("vocab_size", 353),
        {QWEN: "embedding.word_embeddings.weight", GLM: "output_layer.weight"},
    ),
    Mutation(
        "training with untied embeddings",
        "an option of a sibling",
        ("F19",),
        "CK114",
        argument("untie_embeddings_and_output_weights", True),
        {QWEN: "output_layer.weight"},
    ),
    Mutation(
        "config.json beside Megatron of a sibling",
        "the wrong --hf-checkpoint",
        ("F5",),
        "CK701",
        hf_config(rms_norm_eps=1e-3),
        {QWEN: "norm_epsilon", GLM: "norm_epsilon"},
        ("slime#1059",),
    ),
    Mutation(
        "config.json beside Megatron with more layers",
        "the wrong --hf-checkpoint",
        ("F5",),
        "CK104",
        hf_config(num_hidden_layers=14, layer_types=None),
        {QWEN: "decoder.layers.{12..13}.mlp.linear_fc1.weight"},
    ),
    Mutation(
        "config.json beside Megatron without MTP",
        "num_nextn_predict_layers was overwritten",
        ("F6",),
        "CK104",
        hf_config(num_nextn_predict_layers=0),
        {GLM: "mtp.layers.0.eh_proj.weight", DEEPSEEK: "mtp.layers.0.eh_proj.weight"},
        ("Megatron-Bridge#4960",),
    ),
)
