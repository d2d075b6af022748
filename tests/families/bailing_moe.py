"""Ling 2.0, of which transformers has no class: GLM-4.5 computes the same, under other names."""

import re

import torch
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from families.case import MOE, SIZES, Case, renamed, strong_mlp
from families.gqa import Fp32RouterBias
from families.mtp import added_layer, reference

# The names of the release by GLM-4.5's.
_NAMES = {
    r"\.embed_tokens\.": ".word_embeddings.",
    r"\.self_attn\.o_proj\.": ".attention.dense.",
    r"\.self_attn\.q_norm\.": ".attention.query_layernorm.",
    r"\.self_attn\.k_norm\.": ".attention.key_layernorm.",
    r"\.e_score_correction_bias$": ".expert_bias",
    r"\.shared_head\.norm\.": ".final_layernorm.",
}
_QUERIES = re.compile(r"(.*)\.self_attn\.q_proj\.weight")


def config(**more):
    """Two dense layers, two shared experts, four groups of three experts."""
    sizes = SIZES | MOE | {"n_routed_experts": 12, "n_shared_experts": 2, "n_group": 4, "topk_group": 2}
    sizes |= {"num_experts_per_tok": 4, "first_k_dense_replace": 2, "routed_scaling_factor": 2.5}
    rope = {"rope_type": "default", "rope_theta": 600000.0, "partial_rotary_factor": 0.5}
    return Glm4MoeConfig(
        **sizes | more, use_qk_norm=True, attention_bias=False, num_nextn_predict_layers=0, rope_parameters=rope
    )


def as_released(content):
    """The keys of Ling-mini-2.0."""
    rope = content.pop("rope_parameters")
    kept = {key: value for key, value in content.items() if key not in ("attention_bias", "topk_method")}
    return kept | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": content["moe_intermediate_size"],
        "norm_topk_prob": True,
        "num_experts": kept.pop("n_routed_experts"),
        "num_shared_experts": kept.pop("n_shared_experts"),
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": None,
        "rope_theta": rope["rope_theta"],
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qkv_bias": False,
    }


def with_names_of_release(tensors):
    """The same tensors as Ling's releases have them, with queries, keys and values in one."""
    found = {}
    for name, tensor in tensors.items():
        if match := _QUERIES.fullmatch(name):
            rows = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[f"{match[1]}.attention.query_key_value.weight"] = torch.cat(rows)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            found[name] = tensor
    return renamed(found, _NAMES)


# The MTP layer by GLM-4.5's names; the release has copies of neither embedding nor output layer.
_draft = added_layer(Glm4MoeDecoderLayer, copies=False)


def draft(model, dtype):
    """The MTP layer under the names of the release."""
    torch.manual_seed(0)
    return with_names_of_release(_draft(model, dtype))


def mtp(model, tensors, tokens):
    """Logits of the MTP layer, which the published modeling code has in DeepSeek's equations."""
    torch.manual_seed(0)
    return reference(Glm4MoeDecoderLayer)(model, _draft(model, torch.float32), tokens)


WITNESS = "transformers' GLM-4.5, whose equations the published modeling code has"
CASES = {
    "bailing_moe": Case(
        config,
        added=draft,
        edit=lambda content: as_released(content) | {"num_nextn_predict_layers": 1},
        value=strong_mlp,
        auto=Fp32RouterBias,
        mtp=mtp,
        witness=f"{WITNESS}; MTP: its decoder layer in the equations of that code",
        whole=with_names_of_release,
    ),
    "bailing_moe_v2-tied": Case(
        lambda: config(n_shared_experts=1, tie_word_embeddings=True),
        edit=lambda content: as_released(content) | {"model_type": "bailing_moe_v2"},
        value=strong_mlp,
        auto=Fp32RouterBias,
        witness=WITNESS,
        whole=with_names_of_release,
    ),
}
