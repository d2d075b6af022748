"""K-EXAONE: three of four layers have a sliding window, and the others no rotary embedding.

First layer dense, sigmoid router with an fp32 selection bias, a shared expert. The multi-token prediction layer is
dense: no released megatron-core builds that after layers with experts, so it is passed through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import attention, dense_mlp, embeddings, layer_count, moe_mlp
from ckptkit.converters.blocks.sigmoid_moe import dense_of_kinds, read_sigmoid_moe
from ckptkit.converters.config.dims import ModelDims, base_dims, first_layers
from ckptkit.converters.config.values import integer, require, sliding_layers, unsupported, window_of
from ckptkit.converters.family import Draft, FusedExperts, ModelFamily, Release
from ckptkit.converters.rules import ParamMapping
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of an exaone_moe config. Source: transformers `ExaoneMoeConfig`, `ExaoneMoeAttention`."""
    sliding, window = _sliding_layers(config), window_of(config)
    counts = {"n_routed_experts": integer(config, "num_experts")}
    counts |= {"n_shared_experts": integer(config, "num_shared_experts", 1)}
    return base_dims(
        {"rms_norm_eps": 1e-5, **config},
        qk_norm=True,
        window=window,
        window_layers=sliding if window else (),
        nope_layers=tuple(layer for layer in range(integer(config, "num_hidden_layers")) if layer not in sliding),
        dense_layers=dense_layers(config),
        **read_sigmoid_moe({**config, **counts}, absent={"routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1}),
    )


def _sliding_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers with a sliding window and rotary embedding.

    Raises CkptkitError for a config without such layers, and for features that only later releases have.
    """
    layers = integer(config, "num_hidden_layers")
    sliding = sliding_layers({**config, "layer_types": config.get("layer_types") or ()}, 4)
    if config.get("sliding_window") is None or not sliding:
        message = "exaone_moe without sliding-window layers (sliding_window, layer_types)"
        raise unsupported(message, "restore them: transformers would rotate no layer, SGLang every layer")
    windows = [config["sliding_window"] if layer in sliding else 0 for layer in range(layers)]
    only = {"sliding_windows": windows, "swiglu_limits": ([0] * layers, [], None)}
    require(config, "exaone_moe", only, "Megatron has one window and one SwiGLU limit for all layers", strict=True)
    return sliding


def dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The dense layers.

    transformers reads `mlp_layer_types`, or else `first_k_dense_replace`; SGLang and vLLM read `is_moe_layer`.
    """
    layers, kinds, routed = integer(config, "num_hidden_layers"), dense_of_kinds(config), config.get("is_moe_layer")
    dense = first_layers(config, "first_k_dense_replace", 1) if kinds is None else kinds
    if routed is not None and routed != [layer not in dense for layer in range(layers)]:
        raise CkptkitError(
            f"config.json: is_moe_layer is {shortened(routed)}, but layers {list(dense)} of {layers} are dense",
            "make them agree: SGLang and vLLM read the first, transformers mlp_layer_types or first_k_dense_replace",
        )
    return dense


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    experts = moe_mlp(dims, shared="shared_experts", bias="e_score_correction_bias")
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *experts)


def _drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    # SGLang builds it under the names of the model's first layer.
    root, joint, own = "mtp.layers.0.", "mtp.fc", "model."
    draft = Draft("mtp.", None, r"re:mtp\..*", root, joint, vllm_joint=True, sglang_own=own, like=0)
    return (draft,) if layer_count(text, "num_nextn_predict_layers") else ()


FAMILIES = (
    ModelFamily(
        ("exaone_moe",),
        # The releases' spelling, which SGLang has, and that of transformers.
        ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
        read_dims,
        mappings,
        passthrough=("mtp.",),
        fused=FusedExperts(renames_tensors=True),
        release=Release(drafts=_drafts, classes={"Router": "ExaoneMoeTopkRouter"}),
    ),
)
