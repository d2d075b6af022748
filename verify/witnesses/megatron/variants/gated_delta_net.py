"""Linear attention: Megatron's own GatedDeltaNet in the layers that have it.

Without the FLA package, whose kernels need a GPU, Megatron's recurrence in torch runs. Megatron builds the spec for
Transformer Engine only; here it gets Megatron's linear layers, with the norm inside the input projection as there.
"""

from __future__ import annotations

import os
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
from torch import Tensor

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant
from verify.witnesses.megatron.variants.zero_centered_norm import rms_norm

# The module that asks whether FLA is there: that of the class, or (from megatron-core 0.19) that of its base.
_MODULE = next(
    module for module in (sys.modules[cls.__module__] for cls in GatedDeltaNet.__mro__) if hasattr(module, "HAVE_FLA")
)
_FLA = _MODULE.HAVE_FLA and torch.cuda.is_available()


class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's linear layer with a norm before it, zero-centred as the config says, named as Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))
        self._eps, self._offset = config.layernorm_epsilon, int(config.layernorm_zero_centered_gamma)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Output and bias of [sequence, batch, hidden]."""
        normed = rms_norm(input_, self._offset + self.layer_norm_weight.float(), self._eps)
        return super().forward(normed, *args, **kwargs)


class _Backend(LocalSpecProvider):  # type: ignore[misc]
    def column_parallel_layer_norm_linear(self) -> type:
        """What Megatron's own layers lack."""
        return NormedColumnParallelLinear


def _l2norm(tensor: Tensor) -> Tensor:
    """FLA's `l2norm`, by its formula."""
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)


def _settings(dims: ModelDims) -> Mapping[str, Any]:
    if dims.linear is None:
        return {}
    # "Deterministic" selects Megatron's recurrence. From 0.19 on, the function that makes the standard spec, in which
    # layers are then replaced, refuses a config that names the variant.
    return {"deterministic_mode": not _FLA, "experimental_attention_variant": None}


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    if dims.linear is None:
        return
    if not _FLA:
        _MODULE.HAVE_FLA, _MODULE.l2norm = True, _l2norm  # type: ignore[attr-defined]
    if transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        if not _FLA:
            # Then Transformer Engine's attention, in the other layers, must be what it calls deterministic, too.
            os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        attention = get_gated_delta_net_module_spec(config, TESpecProvider())
    else:
        attention = get_gated_delta_net_module_spec(config, _Backend())
    for place, layer in enumerate(spec.layer_specs):
        if layer.metainfo["layer"] in dims.linear.layers:
            modules = replace(layer.submodules, input_layernorm=IdentityOp, self_attention=attention)
            spec.layer_specs[place] = replace(layer, submodules=modules)


GATED_DELTA_NET = Variant(_settings, _adapt)
