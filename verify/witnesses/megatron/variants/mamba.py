"""Mamba-2 mixers, MLPs of a squared ReLU, and experts that work in a smaller size: Megatron's own modules.

Without the package mamba_ssm, whose kernels need a GPU, the recurrence and the norm behind it run in torch, by their
formulas. Megatron builds these layers for Transformer Engine only; here they get Megatron's own linear layers.
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
from torch import Tensor
from torch.nn import functional

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.gated_delta_net import NormedColumnParallelLinear
from verify.witnesses.megatron.variants.variant import Variant
from verify.witnesses.megatron.variants.zero_centered_norm import rms_norm

_MIXER: Any = sys.modules[MambaMixer.__module__]
_KERNELS = bool(_MIXER.HAVE_MAMBA_SSM) and torch.cuda.is_available()
# Whether megatron-core has Transformer Engine's linear layer for the two projections around smaller experts.
_ENGINE = bool(vars(moe_layer).get("HAVE_TE"))


class GatedNorm(torch.nn.Module):
    """`RMSNorm` of mamba_ssm: root mean square norm of x silu(z), over each group of features, times its weight."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, **factory: Any) -> None:
        super().__init__()
        assert not norm_before_gate, "Megatron's mixer applies the gate first"
        self.weight = torch.nn.Parameter(torch.ones(size, **factory))
        self.eps, self.group_size = eps, group_size

    def forward(self, tensor: Tensor, gate: Tensor) -> Tensor:
        """Both [sequence, batch, features]."""
        gated = tensor.float() * functional.silu(gate.float())
        grouped = gated.reshape(*gated.shape[:-1], -1, self.group_size)
        normed = rms_norm(grouped, self.weight.float().reshape(-1, self.group_size), self.eps)
        return normed.flatten(-2).type_as(tensor)

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


def scan(
    x: Tensor,
    dt: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    **more: Any,
) -> Tensor:
    """`mamba_chunk_scan_combined` of mamba_ssm as the recurrence that it stands for, token by token, in float32.

    x [batch, sequence, heads, head_dim], dt [batch, sequence, heads], rates (A) [heads], b and c [batch, sequence,
    groups, state], D [heads]: state = state exp(dt A) + dt x b, y = state c + D x. Raises TypeError for what Megatron
    asks of the kernel and this does not do.
    """
    skip, bias, softplus = (more.pop(name) for name in ("D", "dt_bias", "dt_softplus"))
    asked = {name: value for name, value in more.items() if value is not None and value is not False}
    asked.pop("state_dtype", None)
    if asked or not softplus:
        raise TypeError(f"the recurrence of Mamba in torch does not know {asked or 'dt without softplus'}")
    heads = x.shape[2]
    step = functional.softplus(dt.float() + bias.float())
    inputs, outputs = (part.float().repeat_interleave(heads // part.shape[2], dim=2) for part in (b, c))
    state = torch.zeros(x.shape[0], heads, x.shape[3], b.shape[3], device=x.device)
    found: list[Tensor] = []
    for place in range(x.shape[1]):
        now = step[:, place]
        taken = (now[..., None] * x[:, place].float())[..., None] * inputs[:, place, :, None]
        state = state * torch.exp(now * rates)[..., None, None] + taken
        found.append((state * outputs[:, place, :, None]).sum(-1))
    result: Tensor = torch.stack(found, dim=1) + skip.float()[:, None] * x.float()
    return result.type_as(x)


class WholeLinear(torch.nn.Module):
    """Transformer Engine's linear layer that every rank holds whole, as Megatron builds the projections of experts."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool, **more: Any) -> None:
        super().__init__()
        assert not bias, "no model has a bias there"
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))

    def forward(self, tensor: Tensor) -> tuple[Tensor, None]:
        """Output and (no) bias."""
        return functional.linear(tensor, self.weight), None


def _settings(dims: ModelDims) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if dims.activation == "relu2":
        found |= {"activation_func": squared_relu, "gated_linear_unit": False}
    if dims.mamba is not None and not _KERNELS:
        _MIXER.HAVE_MAMBA_SSM, _MIXER.mamba_chunk_scan_combined, _MIXER.ExtendedRMSNorm = True, scan, GatedNorm
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
