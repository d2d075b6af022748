"""Mamba-2 mixers, MLPs of a squared ReLU, and experts that work in a smaller size: Megatron's own modules.

Megatron builds mixers only where the package mamba_ssm is, and these layers for Transformer Engine only; here they get
Megatron's own linear layers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.gated_delta_net import NormedColumnParallelLinear
from verify.witnesses.megatron.variants.variant import Variant, WholeLinear, not_computed

_MIXER: Any = sys.modules[MambaMixer.__module__]
_KERNELS = bool(_MIXER.HAVE_MAMBA_SSM) and torch.cuda.is_available()
# Whether megatron-core has Transformer Engine's linear layer for the two projections around smaller experts.
_ENGINE = bool(vars(moe_layer).get("HAVE_TE"))


class GatedNorm(torch.nn.Module):
    """The weight of mamba_ssm's `RMSNorm`, in the place of Megatron's subclass of it."""

    forward = not_computed

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, **factory: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, **factory))
        self.eps, self.group_size = eps, group_size

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """As Megatron's subclass of that norm has it: the weight is cut over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def _settings(dims: ModelDims) -> Mapping[str, Any]:
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


MAMBA = Variant(_settings)
