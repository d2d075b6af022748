"""Maps the local names of a Megatron rank to the names of global tensors.

A rank counts its layers and experts from 0. `decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight` of a rank
with layers 6 and 7 and experts 4 to 7 is part of `decoder.layers.7.mlp.experts.experts.4.linear_fc1.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_LAYER = re.compile(r"(decoder\.layers)\.(\d+)\.(.+)")
# The transformer layer of a multi-token prediction layer, up to megatron-core 0.16 and since then.
_MTP = re.compile(r"(mtp\.layers\.\d+)\.(?:transformer_layer|mtp_model_layer)\.(.+)")
# HybridModel has a stack of layers instead.
_MTP_STACK = re.compile(r"(mtp\.layers\.\d+\.mtp_model_layer\.layers\.\d+\.)(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")

# Latent attention: complete on every rank in Transformer Engine's spec, cut by rows in the local spec.
CUT_IN_LOCAL_SPEC = re.compile(r".*\.self_attention\.linear_(q|kv)_down_proj\.weight")

# Megatron's local spec has separate modules for norms; the rules have the names of the Transformer Engine spec.
_LOCAL_SPEC = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    # In all specs: newer megatron-core has two parameters of the mixer instead of a module.
    "mixer.conv1d_": "mixer.conv1d.",
}


def global_name(local: str, layers: Sequence[int], experts: Sequence[int], rules: Collection[str]) -> str:
    """The name of a parameter's global tensor; `layers` and `experts` are those of its rank.

    The caller reports names that are not in `rules`. Raises IndexError for a layer or expert that the rank lacks.
    """
    if match := _LAYER.fullmatch(local):
        return _in_layer(f"{match[1]}.{layers[int(match[2])]}.", match[3], experts, rules)
    if match := _MTP_STACK.fullmatch(local):
        return _in_layer(match[1], match[2], experts, rules)
    if match := _MTP.fullmatch(local):
        # Megatron keeps all of them on one pipeline stage, so their numbers are global.
        return _in_layer(f"{match[1]}.transformer_layer.", match[2], experts, rules)
    # The last pipeline stage of a model with tied embeddings has a second copy of them.
    return local if local in rules or local != "output_layer.weight" else "embedding.word_embeddings.weight"


def _in_layer(prefix: str, rest: str, experts: Sequence[int], rules: Collection[str]) -> str:
    """The global name of the parameter `rest` in a transformer layer with the global name `prefix`."""
    if expert := _LOCAL_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.experts.{experts[int(expert[1])]}.{expert[2]}"
    elif grouped := _GROUPED_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.experts.{experts[int(grouped[3])]}.{grouped[1]}.{grouped[2]}"
    renamed = next((new + rest.removeprefix(old) for old, new in _LOCAL_SPEC.items() if rest.startswith(old)), rest)
    return prefix + (rest if prefix + rest in rules else renamed)
