"""Arguments of another model: in common.pt of a Megatron checkpoint, also of a HybridModel, and those of `verify`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import models
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mutations.edits import edit_common, edit_json
from mutations.mutation import Damage, Mutation, at
from mutations.torch_dist import lost, metadata

QWEN, QWEN3, GLM, DEEPSEEK = "qwen2/megatron", "qwen3_moe/megatron", "glm4_moe/megatron", "deepseek_v3/megatron"
HYBRID = "glm4_moe/hybrid"


def argument(name: str, value: Any) -> Damage:
    """One stored argument has another value."""
    return lambda path, place: edit_common(path, lambda common: setattr(common["args"], name, value))


def _of(modes: str, name: str, value: Any, *labels: str) -> Mutation:
    return Mutation(modes, "CK701", argument(name, value), at(name, *labels))


def hf_config(**values: Any) -> Damage:
    """config.json beside the Megatron checkpoint is changed."""
    return lambda path, place: edit_json(path / "hf" / "config.json", lambda config: config.update(values))


_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_QKV = "decoder.layers.{0,2,4,6,8,10,12,14,16,18,20,22}.self_attention.linear_qkv.weight"
_PATTERN = "*-" * 3 + "*E" * 9 + "/*E"  # three dense layers where the model has two


def numbered(number: Callable[[int], int]) -> Damage:
    """Every decoder layer is stored under another number; what a finding names is a tensor that is then missing."""

    def other(key: str) -> str:
        match = _LAYER.fullmatch(key)
        return f"{match[1]}{number(int(match[2]))}{match[3]}" if match else key

    def change(content: Metadata) -> None:
        content.state_dict_metadata = {other(key): entry for key, entry in content.state_dict_metadata.items()}
        content.storage_data = {
            MetadataIndex(other(index.fqn), index.offset, index.index): place
            for index, place in content.storage_data.items()
        }

    return lambda path, place: models.edit_metadata(path / "release", change)


def nothing(path: Path, place: str) -> None:
    """The checkpoint stays as it is."""


MUTATIONS = {
    "training without rotary base": _of("F5 F18", "rotary_base", 500000, QWEN, GLM),
    "training with another rotary share": _of("F5 F18", "rotary_percent", 1.0, GLM),
    "training with another epsilon": _of("F5", "norm_epsilon", 1e-3, QWEN, DEEPSEEK),
    "training with other heads": _of("F5 F25", "num_attention_heads", 8, QWEN),
    "training without grouped attention": Mutation(
        "F5 F25", "CK701", argument("group_query_attention", False), {GLM: "num_query_groups"}
    ),
    "training with other head size": _of("F5 F25", "kv_channels", 64, QWEN3),
    "training with another MLP size": _of("F5", "ffn_hidden_size", 512, QWEN),
    "training with another expert size": _of("F5", "moe_ffn_hidden_size", 64, GLM, DEEPSEEK),
    "training without shared experts": _of("F5", "moe_shared_expert_intermediate_size", None, GLM),
    "training with another top-k": _of("F5", "moe_router_topk", 2, QWEN3, GLM),
    "training with softmax scores": _of("F5", "moe_router_score_function", "softmax", GLM, DEEPSEEK),
    "training without routed scaling": _of("F5", "moe_router_topk_scaling_factor", None, GLM, DEEPSEEK),
    "training without expert bias": _of("F5 F9", "moe_router_enable_expert_bias", False, DEEPSEEK),
    "training with other expert groups": _of("F5", "moe_router_num_groups", None, DEEPSEEK),
    "training with dense layers elsewhere": _of("F5", "moe_layer_freq", [0] + [1] * 11, GLM, DEEPSEEK),
    "training without query and key norms": _of("F5", "qk_layernorm", False, QWEN3),
    "training without attention biases": _of("F5", "add_qkv_bias", False, QWEN),
    "training with biases everywhere": _of("F5", "add_bias_linear", True, QWEN),
    "training with another norm": _of("F5", "normalization", "LayerNorm", QWEN),
    "training without SwiGLU": _of("F5", "swiglu", False, QWEN),
    "training with another latent rank": _of("F5", "kv_lora_rank", 512, DEEPSEEK),
    "training with plain rotary embedding": _of("F5 F18", "rotary_scaling_factor", 1.0, DEEPSEEK),
    "training with another mscale": _of("F5 F18", "mscale_all_dim", 0.0, DEEPSEEK),
    "export cuts the vocabulary": _of("F23", "vocab_size", 340, QWEN, GLM),
    "training with a layer less": Mutation(
        "F5", "CK114", argument("num_layers", 11), at("decoder.layers.11.*", QWEN, GLM)
    ),
    "training without the MTP layer": Mutation(
        "F6", "CK114", argument("mtp_num_layers", None), at("mtp.layers.0.*", GLM, DEEPSEEK)
    ),
    "training with more experts": Mutation(
        "F5 F8", "CK114", argument("num_experts", 16), at("experts.{12..15}.linear_fc1.weight", QWEN3, GLM)
    ),
    "training with tied embeddings": Mutation(
        "F19", "CK114", argument("untie_embeddings_and_output_weights", False), {GLM: "output_layer.weight"}
    ),
    "training with a larger vocabulary": Mutation(
        "F23",
        "CK114",
        argument("vocab_size", 353),
        {QWEN: "embedding.word_embeddings.weight", GLM: "output_layer.weight"},
    ),
    "training with untied embeddings": Mutation(
        "F19", "CK114", argument("untie_embeddings_and_output_weights", True), {QWEN: "output_layer.weight"}
    ),
    "config.json beside Megatron of a sibling": Mutation(
        "F5", "CK701", hf_config(rms_norm_eps=1e-3), at("norm_epsilon", QWEN, GLM)
    ),
    "config.json beside Megatron with more layers": Mutation(
        "F5",
        "CK104",
        hf_config(num_hidden_layers=14, layer_types=None),
        {QWEN: "decoder.layers.{12..13}.mlp.linear_fc1.weight"},
    ),
    "config.json beside Megatron without MTP": Mutation(
        "F6", "CK104", hf_config(num_nextn_predict_layers=0), at("mtp.layers.0.eh_proj.weight", GLM, DEEPSEEK)
    ),
    "layers of a HybridModel shifted by one": Mutation(
        "F21",
        "CK104",
        numbered(lambda layer: layer + 1),
        {HYBRID: _QKV},
    ),
    "attention and MLP of a HybridModel exchanged": Mutation(
        "F21",
        "CK104",
        numbered(lambda layer: layer ^ 1),
        {HYBRID: _QKV},
    ),
    "final norm of a HybridModel lost": Mutation("F1", "CK104", metadata(lost), {HYBRID: "decoder.final_norm.weight"}),
    "layer pattern of another model": Mutation(
        "F5", "CK701", argument("hybrid_layer_pattern", _PATTERN), {HYBRID: "hybrid_layer_pattern"}
    ),
    # Sizes that the test models cannot be cut into, of 12 layers, 12 experts of 96 features, 10 heads in 2 groups.
    "heads that tensor parallel ranks cannot share": Mutation(
        "F15", "CK703", nothing, at("num_attention_heads", "qwen2/hf", "glm4_moe/megatron"), arguments={"tp": 4}
    ),
    "experts that expert parallel ranks cannot share": Mutation(
        "F15", "CK703", nothing, at("the number of experts", "qwen3_moe/hf", "glm4_moe/megatron"), arguments={"ep": 5}
    ),
    "expert parallel ranks of a dense model": Mutation(
        "F15", "CK703", nothing, {"qwen2/megatron": "the number of experts = 0"}, arguments={"ep": 2}
    ),
    "more pipeline stages than layers": Mutation(
        "F15", "CK703", nothing, at("num_hidden_layers", "qwen2/megatron", "deepseek_v3/megatron"), arguments={"pp": 16}
    ),
    "pipeline stages with a remainder": Mutation(
        "F15", "CK703", nothing, {"qwen2/megatron": "num_hidden_layers"}, severity="warning", arguments={"pp": 5}
    ),
    "kernel tile cut through by tensor parallel ranks": Mutation(
        "F15",
        "CK307",
        nothing,
        at("experts of 96 features on 2 ranks", "glm4_moe/int4", "qwen3_moe/int4"),
        arguments={"tp": 2},
    ),
}
