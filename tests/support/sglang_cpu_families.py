"""What SGLang 0.5.16 computes of test models of `families` on the CPU, with torch alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXAONE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
SIZES: Mapping[str, Mapping[str, Any]] = {
    # Its class takes the hidden size divided by the heads for a head's size, whatever head_dim says.
    "mixtral": {"num_attention_heads": 4},
    # Its class reads the base of rotary embedding where transformers 5 does not write it, and takes that of K-EXAONE.
    **dict.fromkeys(("exaone_moe", "exaone_moe-groups-tied"), _EXAONE),
    # All tokens of the tests have an embedding for each layer.
    "gemma4-small": {"vocab_size_per_layer_input": 352},
}
COMPUTED = (
    *("qwen2-untied", "qwen3-tied", "llama", "mistral", "glm4", "gemma3_text", "qwen2_5_vl", "qwen3_vl-tied"),
    *("qwen3_moe", "glm4_moe", "qwen3_vl_moe", "deepseek_v3", "moonlight", "glm4_moe_lite", "kimi_k2", "mixtral"),
    *("ministral3", "phi3", "hy_v3", "exaone_moe", "exaone_moe-groups-tied", "olmoe", "gemma4-small", "step3p5"),
)
# Classes whose window is one token longer than the config's, which here says one less for them.
LONGER_WINDOW = ("exaone_moe", "step3p5")
DAILY = ("qwen3_moe", "deepseek_v3")
# What its class does not compute: biases of the MLP, which the witness names, and windows of Mistral and Phi-3.
WITHOUT = ("llama-biases", "mistral-window", "phi3-tied-window")
# What needs a GPU: Triton kernels of linear attention, of mixers, of Qwen2-MoE's shared expert and of MiniMax's norms;
# sinks, indexers and an activation, which its torch paths do not know. ERNIE's bias of two axes is not made for them.
RAISED = {
    "qwen3_5": "There should only be one.",
    "qwen2_moe": "There should only be one.",
    "minimax_m2": "in rms_sumsq_serial",
    "gpt_oss": "got an unexpected keyword argument 'sinks'",
    "minimax_m3_vl": "got an unexpected keyword argument 'idx_q'",
    "gemma4": "activation = gelu is not supported.",
    "ernie4_5_moe": "Index tensor must have the same number of dimensions as input tensor",
    "granitemoehybrid": "AssertionError (at sglang/srt/models/granitemoehybrid.py",
    "nemotron_h": "AssertionError (at sglang/srt/models/nemotron_h.py",
}
