"""Norms that Megatron's local spec does not build.

A weight stored minus one (`--apply-layernorm-1p`) is computed only by Transformer Engine's norm; Megatron's wrapper of
torch's refuses it. Norms after attention and MLP, before the residual addition, are not in megatron-core: GLM-4 has
them as modules of the layer, as in slime's patch of Megatron-LM; Gemma 3 inside the linear layer before them, as in
Megatron-Bridge (`models/common/te_layers.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from ckptkit.converters.config.dims import ModelDims
from ckptkit.verify.witnesses.megatron.variants.variant import BlockSpec, Variant, not_computed


class ZeroCenteredNorm(torch.nn.Module):
    """The weight of a norm that is stored minus one, built as Megatron builds its own."""

    forward = not_computed

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps


_TORCH_NORM = WrappedTorchNorm.__new__


def _norm(cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **more: Any) -> Any:
    if config.layernorm_zero_centered_gamma:
        return ZeroCenteredNorm(hidden_size, eps)
    return _TORCH_NORM(cls, config, hidden_size, eps, **more)


def _adapt_zero_centered(dims: ModelDims, config: TransformerConfig, spec: BlockSpec, transformer_engine: bool) -> None:
    # For the process, since other specs (final norm, multi-token prediction) have that wrapper too.
    if dims.norm_offset and not transformer_engine:
        WrappedTorchNorm.__new__ = _norm


ZERO_CENTERED_NORM = Variant(adapt=_adapt_zero_centered)

Norm = Callable[..., torch.nn.Module]


class SandwichLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer with slime's two norms and their names."""

    forward = not_computed

    def __init__(self, config: TransformerConfig, *args: Any, norm: Norm, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        options = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm, self.post_mlp_layernorm = norm(**options), norm(**options)


def _normed_linear(base: type, norm: Norm) -> type:
    """A row parallel linear layer of Megatron with a norm of its output, named as in Megatron-Bridge."""

    class NormedLinear(base):  # type: ignore[misc]
        forward = not_computed

        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

    return NormedLinear


def mlp_submodules(layer: Any) -> Any:
    """The submodules of a layer spec's MLP, a ModuleSpec in megatron-core 0.16 and a partial function in 0.19."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def _adapt_sandwich(dims: ModelDims, config: TransformerConfig, spec: BlockSpec, transformer_engine: bool) -> None:
    if dims.sandwich == "layer":
        for layer in spec.layer_specs:
            layer.module, layer.params = SandwichLayer, {"norm": spec.layer_norm}
    elif dims.sandwich:
        base: type = LocalSpecProvider().row_parallel_linear()
        if transformer_engine:
            from megatron.core.extensions.transformer_engine import TERowParallelLinear

            base = TERowParallelLinear
        for layer in spec.layer_specs:
            linear = _normed_linear(base, spec.layer_norm)
            layer.submodules.self_attention.submodules.linear_proj = mlp_submodules(layer).linear_fc2 = linear


SANDWICH = Variant(adapt=_adapt_sandwich)
