"""Families with norms also after attention and MLP: GLM-4-0414 and Gemma 3."""

import torch
from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma3TextConfig, Glm4Config, SiglipVisionConfig

from families.case import SIZES, Case, random

# transformers wants Gemma's hidden size to divide by the heads, even if head_dim says otherwise. The window is shorter
# than the test's tokens, and neither scale follows from another size.
GEMMA = SIZES | {
    "num_attention_heads": 8,
    "head_dim": 40,
    "query_pre_attn_scalar": 60,
    "sliding_window": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma_value(name, tensor, dtype):
    """Norm weights around 0, as they are stored minus one, and queries and keys so large that rotation matters."""
    if "norm" in name and tensor.dim() == 1:
        return (0.2 * torch.randn(tensor.shape)).to(dtype)
    return random(name, tensor, dtype) * (5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1)


def as_released(text):
    """Layers and rotary settings as transformers v4 spells them, and Gemma's releases."""
    kept = {
        key: value
        for key, value in text.items()
        if key not in {"rope_parameters", "layer_types", "_sliding_window_pattern"}
    }
    return kept | {
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 6,
    }


def multimodal():
    return Gemma3Config(
        text_config=Gemma3TextConfig(**GEMMA), vision_config=SiglipVisionConfig(**VISION), mm_tokens_per_image=4
    )


def nested_as_released(config):
    """The releases with a vision tower leave out of text_config what is transformers' default."""
    text = as_released(config["text_config"])
    for key in ("rms_norm_eps", "sliding_window_pattern", "hidden_activation", "tie_word_embeddings"):
        del text[key]
    return config | {"text_config": text}


def glm4_tied():
    """No release is like this one, but the architecture allows it; rotary positions are interpolated."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Glm4Config(**SIZES, tie_word_embeddings=True, attention_bias=False, rope_parameters=rope)


CASES = {
    "glm4": Case(lambda: Glm4Config(**SIZES)),
    "glm4-tied": Case(glm4_tied),
    "gemma3_text": Case(lambda: Gemma3TextConfig(**GEMMA), value=gemma_value),
    "gemma3_text-v4": Case(lambda: Gemma3TextConfig(**GEMMA), value=gemma_value, edit=as_released),
    "gemma3": Case(multimodal, value=gemma_value, edit=nested_as_released, auto=AutoModelForImageTextToText),
}
