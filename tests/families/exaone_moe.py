"""K-EXAONE, whose dense multi-token prediction layer is only carried along."""

import torch
from transformers import ExaoneMoeConfig
from transformers.models.exaone_moe.modeling_exaone_moe import ExaoneMoeDecoderLayer

from families.case import MOE, SIZES, Case, random
from families.gqa import Fp32RouterBias
from families.mtp import random_layer

# The window is shorter than the tests' tokens.
KINDS = {
    "sliding_window": 5,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10,
}


def config(**more):
    """Two dense layers, two shared experts."""
    sizes = SIZES | MOE | KINDS | {"num_experts": 12, "num_shared_experts": 2}
    return ExaoneMoeConfig(**sizes | more)


def as_released(content):
    """With the keys that the releases have and transformers does not write, and their spelling of the class."""
    return content | {
        "architectures": ["ExaoneMoEForCausalLM"],
        "is_moe_layer": [kind == "sparse" for kind in content["mlp_layer_types"]],
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "sliding_window_pattern": "LLLG",
        "topk_method": "noaux_tc",
    }


def draft(model, dtype):
    """The MTP layer of the releases: a dense layer, and what joins the embedding and the hidden state."""
    hidden = model.config.hidden_size
    shapes = dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), (hidden,))
    around = {name: torch.empty(shape) for name, shape in (shapes | {"fc": (hidden, 2 * hidden)}).items()}
    joined = {f"mtp.{name}.weight": random(name, tensor, dtype) for name, tensor in around.items()}
    return random_layer(ExaoneMoeDecoderLayer(model.config, 0), "mtp.layers.0.", dtype) | joined


CASES = {
    "exaone_moe": Case(config, added=draft, edit=as_released, auto=Fp32RouterBias),
    "exaone_moe-groups-tied": Case(
        lambda: config(n_group=4, topk_group=1, num_experts_per_tok=2, tie_word_embeddings=True, sliding_window=600),
        edit=as_released,
        auto=Fp32RouterBias,
    ),
}
