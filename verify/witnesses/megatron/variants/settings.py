"""What Megatron-LM itself makes of arguments before it calls megatron-core, and a gate for which it has no argument.

GPT-OSS: `--quick-geglu` and YaRN; everything else is megatron-core's own. Gemma 3: a gated MLP; what Megatron-Bridge's
provider adds besides (`models/gemma/gemma3_provider.py`) has no parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from megatron.core.activations import quick_gelu
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.verify.witnesses.megatron.variants.variant import Variant

# megatron-core's GPTModel reads YaRN from attributes that its config does not declare. Source: Megatron-LM 0.19
# `_apply_yarn_config_from_args`, which sets them from these arguments.
_YARN = {
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
    "yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
}


def _settings(dims: ModelDims) -> Mapping[str, Any]:
    # Not as Megatron wraps it: torch.compile would build it anew for every number of tokens that an expert gets.
    return (
        {"activation_func": inspect.unwrap(quick_gelu), "gated_linear_unit": True}
        if dims.activation == "quick_geglu"
        else {}
    )


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    args = megatron_args(dims)
    if args["position_embedding_type"] == "yarn":
        for attribute, argument in _YARN.items():
            setattr(config, attribute, args[argument])


GPT_OSS = Variant(settings=_settings, adapt=_adapt)


GEMMA3 = Variant(settings=lambda dims: {"gated_linear_unit": True} if dims.activation == "gelu_pytorch_tanh" else {})
