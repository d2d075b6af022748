"""Which tensors trainers pack on their way to an engine, in formats other than INT4.

Their online quantizers choose by name, and but for miles' NVFP4 and verl's SGLang path read no list of the config.
Each row is held against the tool's own function in `tests/interop/test_online_selection.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from converters.hf_names import tail

_MLP = r"(?:gate|up|down|gate_up)_proj"
_EXPERTS = rf"(?:mlp|block_sparse_moe)\.(?:experts\.#|shared_experts?)\.(?:{_MLP}|w[123])"
_ATTENTION = r"self_attn\.(?:[qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj)"
_INDEXER_KEY = "self_attn.indexer.wk"
# What the Megatron names that slime and miles choose by become in a release.
_BLOCK = re.compile(rf"{_EXPERTS}|mlp\.{_MLP}|{_ATTENTION}|self_attn\.indexer\.(?:wq_b|wk)")
_LINEAR_ATTENTION = re.compile(r"linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)")
_EXPERTS_ONLY = re.compile(_EXPERTS)
# verl's lists of parts of names.
_VERL_LEAVES = ("embed_tokens", "lm_head", "layernorm", "norm", "ln_", "embeddings", "mlp.gate.weight")
_VERL_TAKES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("fc1", "fc2", "mlp"),
)


def slime_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """slime's and vime's block FP8: a list of Megatron names, which has the indexer's `wk` but no `weights_proj`.

    `in_proj_qkvz` of Qwen3-Next is not in it. Source: slime `quantizer_fp8.py`, `quantize_params_fp8`.
    """
    return bool(_BLOCK.fullmatch(_module(parameter)) or _LINEAR_ATTENTION.fullmatch(_module(parameter)))


def miles_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' block FP8: slime's list without `wk` where the indexer's rotary embedding is interleaved."""
    return slime_fp8(parameter, config) and not _left_out_by_miles(parameter, config)


def miles_mxfp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' MXFP8: its FP8 list without linear attention. Source: miles `quantizer_mxfp8.py`."""
    return bool(_BLOCK.fullmatch(_module(parameter))) and not _left_out_by_miles(parameter, config)


def miles_nvfp4(parameter: str, config: Mapping[str, Any]) -> bool:
    """miles' NVFP4: routed and shared experts, less what the list names. Source: miles `quantizer_nvfp4.py`."""
    return bool(_EXPERTS_ONLY.fullmatch(_module(parameter)))


def verl_fp8(parameter: str, config: Mapping[str, Any]) -> bool:
    """verl's block FP8 for SGLang and TensorRT-LLM: parts of names.

    `mlp` takes in `shared_expert_gate`; `q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`, `kv_b_proj` hold none of them.
    Source: verl `fp8_utils.py`, `FP8QuantizerHelper.should_quantize_param`.
    """
    name = parameter.lower()
    if not parameter.endswith(".weight") or any(part in name for part in _VERL_LEAVES):
        return False
    return any(part in name for part in _VERL_TAKES)


def _left_out_by_miles(parameter: str, config: Mapping[str, Any]) -> bool:
    return _module(parameter) == _INDEXER_KEY and bool(config.get("indexer_rope_interleave"))


def _module(parameter: str) -> str:
    return tail(parameter.removesuffix(".weight"))
