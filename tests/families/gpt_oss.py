"""GPT-OSS, with its experts as every release has them: fused, transposed, gate and up taking turns."""

import torch
from transformers import GptOssConfig

from families.case import SIZES, Case, random

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# The window is shorter than the test's tokens.
GPT_OSS = SIZES | {
    "intermediate_size": 96,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "rope_parameters": ROPE,
}

# Standard deviations that send many gates and ups beyond the clamp at 7, let sinks take much of the attention, and make
# the rotation of queries and keys matter.
_LARGE = {
    "gate_up_proj": 0.3,
    "gate_up_proj_bias": 2.0,
    "down_proj_bias": 0.5,
    "sinks": 1.0,
    "bias": 0.3,
    "q_proj.weight": 0.1,
    "k_proj.weight": 0.1,
}


def value(name, tensor, dtype):
    scale = next((scale for end, scale in _LARGE.items() if name.endswith("." + end)), None)
    return random(name, tensor, dtype) if scale is None else (scale * torch.randn(tensor.shape)).to(dtype)


# As no release has it: the range of corrected frequencies rounded, and magnitudes of their own.
ROUNDED = ROPE | {
    "truncate": True,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.4,
}


def as_released(config):
    """Rotary settings as transformers v4 spells them, and keys that only the releases have."""
    rope = dict(config.pop("rope_parameters"))
    return config | {
        "rope_theta": int(rope.pop("rope_theta")),
        "rope_scaling": rope,
        "experts_per_token": 3,
        "initial_context_length": 4096,
        "swiglu_limit": 7.0,
    }


CASES = {
    "gpt_oss": Case(lambda: GptOssConfig(**GPT_OSS), value=value, edit=lambda config: config | {"swiglu_limit": 7.0}),
    "gpt_oss-v4": Case(lambda: GptOssConfig(**GPT_OSS | {"rope_parameters": ROUNDED}), value=value, edit=as_released),
}
