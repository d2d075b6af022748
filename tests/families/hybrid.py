"""Qwen3-Next, Qwen3.5 and 3.6, with linear attention, gated attention and an MTP layer; and Qwen3-VL."""

from dataclasses import replace

import torch
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from families.case import MOE, SIZES, Case, random
from families.mtp import load_layer, next_tokens, random_layer, run_layer
from families.qwen import VISION as QWEN_VISION

# Every fourth layer has full attention. Key heads, value heads, their sizes, and those of attention all differ.
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    # The product of a query and a key is now and then about 0. With a smaller epsilon the norm after linear attention
    # would magnify the rounding error that is then left.
    "rms_norm_eps": 1e-2,
}
ROUTED = MOE | {"num_experts": 12, "shared_expert_intermediate_size": 72}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
VISION = QWEN_VISION | {"num_position_embeddings": 16}


def value(name, tensor, dtype):
    """As `random`, with norms around 0 where 1 is added to them. Both kinds of attention and the MTP layer are strong.

    Linear attention forgets slowly, over some tokens, so its sums stay small, and exact to a float32's last bits.
    """
    if name.endswith(("A_log", "dt_bias")):
        return (torch.randn(tensor.shape) * 0.5 - 1).to(dtype)
    result = random(name, tensor, dtype)
    if name.endswith("linear_attn.norm.weight") or name.startswith("model.visual."):
        return result
    if "norm" in name:
        return result - 1
    if "conv1d" in name:
        return result * 20
    if name.startswith("mtp.layers.") or "shared_expert" in name:
        return result * 5
    return result * 3 if "_attn." in name else result


def wide_state(name, tensor, dtype):
    """As `value`, with A_log and the norm of linear attention in float32, as Qwen3.5 has them."""
    return value(name, tensor, torch.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else dtype)


def text_config(model):
    return getattr(model.config, "text_config", model.config)


def added_mtp(layer, *, fused=False):
    """The tensors of the MTP layer, around a decoder layer of this class; `fused`: with one tensor for all experts."""

    def added(model, dtype):
        config = text_config(model)
        # As the last layer, with full attention.
        hidden, made = config.hidden_size, layer(config, config.num_hidden_layers - 1)
        whole = {"mtp.layers.0." + name: tensor for name, tensor in made.state_dict().items()}
        tensors = whole if fused else random_layer(made, "mtp.layers.0.", dtype)
        shapes = {
            f"mtp.{norm}.weight": torch.empty(hidden)
            for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        }
        shapes["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
        return {name: value(name, tensor, dtype) for name, tensor in {**tensors, **shapes}.items()}

    return added


def mtp_logits(layer):
    """Logits of the MTP layer: the decoder layer in the equations of `families.mtp`, with this family's norms.

    That `fc` takes the embedding first is what SGLang's classes do (tests/converters/test_sglang_mtp.py runs them).
    """

    def logits(model, added, tokens):
        config, language = text_config(model), getattr(model.model, "language_model", model.model)
        made = layer(config, config.num_hidden_layers - 1)
        if "mtp.layers.0.mlp.experts.gate_up_proj" in added:
            made.load_state_dict({name: added["mtp.layers.0." + name] for name in made.state_dict()})
        else:
            load_layer(made, "mtp.layers.0.", added)

        def norm(name, hidden):
            module = Qwen3NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            module.load_state_dict({"weight": added[f"mtp.{name}.weight"]})
            return module(hidden)

        embedded = norm("pre_fc_norm_embedding", language.embed_tokens(next_tokens(tokens)))
        hidden = norm("pre_fc_norm_hidden", language(input_ids=tokens).last_hidden_state)
        joined = nn.functional.linear(torch.cat([embedded, hidden], dim=-1), added["mtp.fc.weight"])
        return nn.functional.linear(norm("norm", run_layer(language, made, joined)), model.lm_head.weight)

    return logits


def _with_mtp(config):
    """config.json of a release with an MTP layer: Qwen3.5's says so in its language part. SGLang reads the rest."""
    text = {"mtp_num_hidden_layers": 1, "full_attention_interval": 4}
    if "text_config" not in config:
        return config | text
    vision = config["vision_config"] | {"deepstack_visual_indexes": []}
    return config | {"text_config": config["text_config"] | text, "vision_config": vision}


def _sizes(*left_out):
    return {key: size for key, size in SIZES.items() if key not in left_out}


DENSE = _sizes() | LINEAR | {"rope_parameters": ROPE | MROPE}
SPARSE = _sizes("intermediate_size") | LINEAR | ROUTED | {"rope_parameters": ROPE | MROPE}
WITNESS = "reference, and SGLang's own class"

VL_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
}
VL_VISION = VISION | {"deepstack_visual_indexes": [0, 1]}

NEXT = Case(
    # Releases say nothing of their MTP layer.
    lambda: Qwen3NextConfig(**_sizes(), **LINEAR, **ROUTED, rope_parameters=ROPE),
    added=added_mtp(Qwen3NextDecoderLayer),
    edit=lambda config: config | {"full_attention_interval": 4},
    value=value,
    mtp=mtp_logits(Qwen3NextDecoderLayer),
    mtp_witness=WITNESS,
)
QWEN3_5 = Case(
    lambda: Qwen3_5Config(text_config=DENSE, vision_config=VISION),
    added=added_mtp(Qwen3_5DecoderLayer),
    edit=_with_mtp,
    value=wide_state,
    auto=AutoModelForImageTextToText,
    mtp=mtp_logits(Qwen3_5DecoderLayer),
    mtp_witness=WITNESS,
)

CASES = {
    "qwen3_next": NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text-tied": Case(
        lambda: Qwen3_5TextConfig(**DENSE, tie_word_embeddings=True),
        edit=lambda config: config | {"full_attention_interval": 4},
        value=wide_state,
    ),
    # Fused as Qwen3.5 ships it: experts of the decoder in one tensor, those of the MTP layer in one each.
    "qwen3_5_moe": replace(
        QWEN3_5,
        config=lambda: Qwen3_5MoeConfig(text_config=SPARSE, vision_config=VISION),
        added=added_mtp(Qwen3_5MoeDecoderLayer),
        mtp=mtp_logits(Qwen3_5MoeDecoderLayer),
        fused=True,
    ),
    # Fused as Qwen3.6 ships it: both.
    "qwen3_5_moe_text": Case(
        lambda: Qwen3_5MoeTextConfig(**SPARSE),
        added=added_mtp(Qwen3_5MoeDecoderLayer, fused=True),
        edit=_with_mtp,
        value=wide_state,
        mtp=mtp_logits(Qwen3_5MoeDecoderLayer),
        mtp_witness=WITNESS,
        fused=True,
    ),
    "qwen3_vl-tied": Case(
        lambda: Qwen3VLConfig(text_config=_sizes() | VL_ROPE, vision_config=VL_VISION, tie_word_embeddings=True),
        auto=AutoModelForImageTextToText,
    ),
    "qwen3_vl_moe": Case(
        lambda: Qwen3VLMoeConfig(text_config=_sizes() | MOE | {"num_experts": 12} | VL_ROPE, vision_config=VL_VISION),
        auto=AutoModelForImageTextToText,
        stored=lambda name, tensor: tensor.transpose(1, 2) if ".mlp.experts." in name else tensor,
    ),
}
