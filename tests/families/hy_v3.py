"""Hunyuan 3, whose releases name router, selection bias and shared expert otherwise than transformers."""

from transformers import HYV3Config
from transformers.models.hy_v3.modeling_hy_v3 import HYV3DecoderLayer

from families.case import MOE, SIZES, Case, renamed, strong_mlp
from families.gqa import Fp32RouterBias
from families.mtp import added_layer, reference

# transformers' names by those of the release.
_NAMES = {
    r"mlp\.router\.gate\.": "mlp.gate.",
    r"mlp\.expert_bias$": "mlp.e_score_correction_bias",
    r"mlp\.shared_mlp\.": "mlp.shared_experts.",
    r"(\d+)\.final_layernorm\.": r"\1.shared_head.norm.",
}


def config():
    """Two dense layers, two shared experts."""
    kinds = ["dense"] * 2 + ["sparse"] * 10
    return HYV3Config(**SIZES, **MOE, num_experts=12, num_shared_experts=2, mlp_layer_types=kinds)


def as_released(content):
    """With the keys that the releases have and transformers does not write."""
    return content | {
        "expert_hidden_dim": content["moe_intermediate_size"],
        "first_k_dense_replace": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "num_nextn_predict_layers": 1,
        "qk_norm": True,
        "route_norm": True,
    }


def mtp_layer(config, number):
    """A layer with experts, as the last of the model."""
    return HYV3DecoderLayer(config, number - 1)


def added(model, dtype):
    """The MTP layer under the names of the release."""
    names = {
        r"mlp\.gate\.": "mlp.router.gate.",
        r"mlp\.e_score_correction_bias$": "mlp.expert_bias",
        r"mlp\.shared_experts\.": "mlp.shared_mlp.",
        r"shared_head\.norm\.": "final_layernorm.",
    }
    return renamed(added_layer(mtp_layer)(model, dtype), names)


def mtp(model, tensors, tokens):
    """Logits of the MTP layer: DeepSeek's equations."""
    return reference(mtp_layer)(model, renamed(tensors, _NAMES), tokens)


CASES = {
    "hy_v3": Case(
        config,
        added=added,
        edit=as_released,
        value=strong_mlp,
        auto=Fp32RouterBias,
        mtp=mtp,
        witness="transformers; MTP: its decoder layer in the equations of the DeepSeek-V3 report",
    )
}
