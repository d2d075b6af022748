"""Norms whose weight is stored minus one (`--apply-layernorm-1p`), for Megatron's own layer spec.

Only Transformer Engine's norm does that; Megatron's wrapper of torch's refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant


def zero_centered_rms_norm(tensor: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis times (1 + weight), computed in float32, in the dtype of the tensor."""
    return rms_norm(tensor, 1 + weight.float(), eps)


def rms_norm(tensor: Tensor, factor: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis times a factor, computed in float32, in the dtype of the tensor."""
    wide = tensor.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).type_as(tensor)


class ZeroCenteredNorm(torch.nn.Module):
    """That norm as a module, built as Megatron builds its own."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, tensor: Tensor) -> Tensor:
        """Any shape whose last axis is `hidden_size`."""
        return zero_centered_rms_norm(tensor, self.weight, self.eps)


_TORCH_NORM = WrappedTorchNorm.__new__


def _norm(cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **more: Any) -> Any:
    if config.layernorm_zero_centered_gamma:
        return ZeroCenteredNorm(hidden_size, eps)
    return _TORCH_NORM(cls, config, hidden_size, eps, **more)


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    # For the process, since the specs of other places (final norm, multi-token prediction) name that wrapper too.
    if dims.norm_offset and not transformer_engine:
        WrappedTorchNorm.__new__ = _norm


ZERO_CENTERED_NORM = Variant(adapt=_adapt)
