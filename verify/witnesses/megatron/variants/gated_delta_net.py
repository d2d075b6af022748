"""Linear attention: Megatron's own GatedDeltaNet in the layers that have it.

Megatron builds it only where the FLA package is, and the spec for Transformer Engine only; here it gets Megatron's
linear layers, with the norm inside the input projection as there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_gated_delta_net_module_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant, not_computed

# The module that asks whether FLA is there: that of the class, or (from megatron-core 0.19) that of its base.
_MODULE = next(
    module for module in (sys.modules[cls.__module__] for cls in GatedDeltaNet.__mro__) if hasattr(module, "HAVE_FLA")
)
_FLA = _MODULE.HAVE_FLA and torch.cuda.is_available()


class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's linear layer with the weight of a norm before it, named as Transformer Engine's."""

    forward = not_computed

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))


class _Backend(LocalSpecProvider):  # type: ignore[misc]
    def column_parallel_layer_norm_linear(self) -> type:
        """What Megatron's own layers lack."""
        return NormedColumnParallelLinear


def _settings(dims: ModelDims) -> Mapping[str, Any]:
    if dims.linear is None:
        return {}
    # From 0.19 on, the function that makes the standard spec, in which layers are then replaced, refuses a config that
    # names the variant.
    return {"experimental_attention_variant": None}


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    if dims.linear is None:
        return
    if not _FLA:
        _MODULE.HAVE_FLA = True  # type: ignore[attr-defined]
    if transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        attention = get_gated_delta_net_module_spec(config, TESpecProvider())
    else:
        attention = get_gated_delta_net_module_spec(config, _Backend())
    for place, layer in enumerate(spec.layer_specs):
        if layer.metainfo["layer"] in dims.linear.layers:
            modules = replace(layer.submodules, input_layernorm=IdentityOp, self_attention=attention)
            spec.layer_specs[place] = replace(layer, submodules=modules)


GATED_DELTA_NET = Variant(_settings, _adapt)
