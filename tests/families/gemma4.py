"""Gemma 4 as text alone, with experts and a vision tower, and with an embedding for each layer."""

import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4VisionConfig,
)

from families.case import SIZES, Case, random

# Layers 5 and 11 are full ones. The window is shorter than the test's tokens.
TEXT = SIZES | {"global_head_dim": 48, "sliding_window": 7, "final_logit_softcapping": 30.0}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
WITHOUT_LAYER_INPUT = {"vocab_size_per_layer_input": 352, "hidden_size_per_layer_input": 0}
EXPERTS = {"enable_moe_block": True, "num_experts": 12, "top_k_experts": 3, "moe_intermediate_size": 96}
# Layers 7 to 11 use the keys and values of layers 5 and 6.
SMALL = {
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 5,
    "use_double_wide_mlp": True,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
    "standardize": True,
}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "output_proj_dims": 24,
    "subsampling_conv_channels": [8, 4],
}


def value(name, tensor, dtype):
    """Scalars of layers and scales of experts around 1; finite bounds of clipped layers, as released."""
    if name.endswith(("_min", "_max")):
        return (torch.randn(tensor.shape) + (5 if name.endswith("max") else -5)).to(dtype)
    if name.endswith(("layer_scalar", ".scale", "per_expert_scale")):
        return (1 + 0.2 * torch.randn(tensor.shape)).to(dtype)
    return random(name, tensor, dtype)


def whole(text, audio=None):
    config = Gemma4TextConfig(**TEXT | text)
    return Gemma4Config(text_config=config, vision_config=Gemma4VisionConfig(**VISION), audio_config=audio)


def unused_keys(model, dtype):
    """Keys and values of the layers that use those of another, as the releases of E2B and E4B have them."""
    found, config = {}, model.config.text_config
    for layer in range(7, 12):
        size = config.global_head_dim if config.layer_types[layer] == "full_attention" else config.head_dim
        rows = (config.num_key_value_heads * size, config.hidden_size)
        for name, shape in {"k_proj": rows, "v_proj": rows, "k_norm": (size,)}.items():
            key = f"model.language_model.layers.{layer}.self_attn.{name}.weight"
            found[key] = random(key, torch.empty(shape), dtype)
    return found


CASES = {
    "gemma4_text": Case(lambda: Gemma4TextConfig(**TEXT | KEYS_AS_VALUES | WITHOUT_LAYER_INPUT), value=value),
    "gemma4": Case(
        lambda: whole(KEYS_AS_VALUES | WITHOUT_LAYER_INPUT | EXPERTS), value=value, auto=AutoModelForImageTextToText
    ),
    "gemma4-small-as-released": Case(
        lambda: whole(SMALL, Gemma4AudioConfig(**AUDIO)),
        value=value,
        auto=AutoModelForImageTextToText,
        added=unused_keys,
    ),
}
