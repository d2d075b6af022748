"""Architectures that Megatron's standard layer spec does not build: each changes the config or the spec."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from megatron.core.activations import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.verify.witnesses.megatron.variants.attention import DSA, FULL_QK_NORM, MLA
from ckptkit.verify.witnesses.megatron.variants.norms import SANDWICH, ZERO_CENTERED_NORM
from ckptkit.verify.witnesses.megatron.variants.recurrent import GATED_DELTA_NET, MAMBA
from ckptkit.verify.witnesses.megatron.variants.variant import BlockSpec, Variant

# megatron-core's GPTModel reads YaRN from attributes that its config does not declare. Megatron-LM 0.19 sets them from
# these arguments in `_apply_yarn_config_from_args`; all attributes have the prefix "yarn_".
_YARN = (
    *("rotary_scaling_factor", "mscale", "mscale_all_dim", "yarn_original_max_position_embeddings"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int"),
)


def _gpt_oss_settings(dims: ModelDims) -> Mapping[str, Any]:
    """Megatron-LM's settings for `--quick-geglu`, without torch.compile, which would run for every number of tokens."""
    if dims.activation != "quick_geglu":
        return {}
    return {"activation_func": inspect.unwrap(quick_gelu), "gated_linear_unit": True}


def _adapt_yarn(dims: ModelDims, config: TransformerConfig, spec: BlockSpec, transformer_engine: bool) -> None:
    args = megatron_args(dims)
    if args["position_embedding_type"] == "yarn":
        for argument in _YARN:
            setattr(config, f"yarn_{argument.removeprefix('yarn_')}", args[argument])


GPT_OSS = Variant(settings=_gpt_oss_settings, adapt=_adapt_yarn)
# Megatron-Bridge's provider (`models/gemma/gemma3_provider.py`) adds other settings too, without parameters.
GEMMA3 = Variant(settings=lambda dims: {"gated_linear_unit": True} if dims.activation == "gelu_pytorch_tanh" else {})
VARIANTS = (FULL_QK_NORM, MLA, GATED_DELTA_NET, MAMBA, ZERO_CENTERED_NORM, DSA, SANDWICH, GEMMA3, GPT_OSS)
