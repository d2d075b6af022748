"""Gated delta nets and Mamba-2 mixers, with experts of a smaller size: Megatron's own modules.

Megatron builds them only if the packages of their kernels are installed (FLA, mamba_ssm), and has specs only for
Transformer Engine; here they get Megatron's linear layers, with the norm inside the input projection as there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_gated_delta_net_module_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from ckptkit.converters.config.dims import ModelDims
from ckptkit.verify.witnesses.megatron.variants.variant import BlockSpec, Variant, WholeLinear, not_computed

# The module with the flag of FLA: that of the class, or (from megatron-core 0.19) that of its base.
_DELTA_NET = next(
    module for module in (sys.modules[cls.__module__] for cls in GatedDeltaNet.__mro__) if hasattr(module, "HAVE_FLA")
)
_HAS_FLA = bool(_DELTA_NET.HAVE_FLA)


class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's linear layer with the weight of a norm before it, named as Transformer Engine's."""

    forward = not_computed

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size, dtype=config.params_dtype))


class _Backend(LocalSpecProvider):  # type: ignore[misc]
    def column_parallel_layer_norm_linear(self) -> type:
        return NormedColumnParallelLinear


def _delta_net_settings(dims: ModelDims) -> Mapping[str, Any]:
    if dims.linear is None:
        return {}
    # "Deterministic" selects Megatron's own recurrence: without it and without FLA, 0.19 does not build the layer. From
    # 0.19 on the function that makes the standard spec, whose layers are then replaced, refuses the variant's name.
    return {"deterministic_mode": not _HAS_FLA, "experimental_attention_variant": None}


def _adapt_delta_nets(dims: ModelDims, config: TransformerConfig, spec: BlockSpec, transformer_engine: bool) -> None:
    if dims.linear is None:
        return
    _DELTA_NET.HAVE_FLA = True  # type: ignore[attr-defined]
    if transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        if not _HAS_FLA:
            # Then Transformer Engine's attention, in the other layers, must be "deterministic" too.
            os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        attention = get_gated_delta_net_module_spec(config, TESpecProvider())
    else:
        attention = get_gated_delta_net_module_spec(config, _Backend())
    for place, layer in enumerate(spec.layer_specs):
        if layer.metainfo["layer"] in dims.linear.layers:
            modules = replace(layer.submodules, input_layernorm=IdentityOp, self_attention=attention)
            spec.layer_specs[place] = replace(layer, submodules=modules)


GATED_DELTA_NET = Variant(_delta_net_settings, _adapt_delta_nets)

_MIXER: Any = sys.modules[MambaMixer.__module__]
_KERNELS = bool(_MIXER.HAVE_MAMBA_SSM) and torch.cuda.is_available()
# Whether megatron-core has Transformer Engine's linear layer for the two projections around smaller experts.
_ENGINE = bool(vars(moe_layer).get("HAVE_TE"))


class GatedNorm(torch.nn.Module):
    """The weight of mamba_ssm's `RMSNorm`, instead of Megatron's subclass of it."""

    forward = not_computed

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, **factory: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, **factory))
        self.eps, self.group_size = eps, group_size

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """As Megatron's subclass of that norm: the weight is divided over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def _mixer_settings(dims: ModelDims) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if dims.activation == "relu2":
        found |= {"activation_func": squared_relu, "gated_linear_unit": False}
    if dims.mamba is not None and not _KERNELS:
        _MIXER.HAVE_MAMBA_SSM, _MIXER.ExtendedRMSNorm = True, GatedNorm
        found |= {"use_mamba_mem_eff_path": False}  # which is a kernel too
    if dims.expert_hidden and not _ENGINE:
        vars(moe_layer).update(HAVE_TE=True, TELinear=WholeLinear)
    return found


def mixer_layer() -> ModuleSpec:
    """The spec of a layer with a mixer, of Megatron's own linear layers."""
    parts = MambaMixerSubmodules(in_proj=NormedColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = ModuleSpec(module=MambaMixer, submodules=parts)
    return ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add))


MAMBA = Variant(_mixer_settings)
