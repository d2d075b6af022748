"""Norms whose weight is stored minus one (`--apply-layernorm-1p`), for Megatron's own layer spec.

Only Transformer Engine's norm computes that; Megatron's wrapper of torch's refuses to be built.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant, not_computed


class ZeroCenteredNorm(torch.nn.Module):
    """The weight of that norm, built as Megatron builds its own."""

    forward = not_computed

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps


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
