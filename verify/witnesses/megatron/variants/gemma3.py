"""Gemma 3: another rotary base in layers with a window, scaled embeddings, and a gate of gelu's tanh approximation.

Not in megatron-core: Megatron-Bridge's model provider brings it (`models/gemma/gemma3_provider.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant


class TwoRopeAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's attention, with the rotary embedding of its layer in the place of the model's."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, layer_number: int, *args: Any, dims: ModelDims, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        local = layer_number - 1 in dims.window_layers
        self.rope = RotaryEmbedding(
            kv_channels=dims.head_dim,
            rotary_percent=dims.rotary_fraction,
            rotary_base=dims.local_rope_theta if local else dims.rope_theta,
            seq_len_interpolation_factor=None if local or dims.rope_scaling is None else dims.rope_scaling["factor"],
            use_cpu_initialization=config.use_cpu_initialization,
        )

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As Megatron's; of the model's rotary embedding only the length is used."""
        result: tuple[Tensor, Tensor | None] = super().forward(
            *args, rotary_pos_emb=self.rope(rotary_pos_emb.shape[0]), **kwargs
        )
        return result


def _gelu(tensor: Tensor) -> Tensor:
    return torch.nn.functional.gelu(tensor, approximate="tanh")


def _settings(dims: ModelDims) -> Mapping[str, Any]:
    if dims.activation != "gelu_pytorch_tanh":
        return {}
    return {"activation_func": _gelu, "gated_linear_unit": True, "softmax_scale": dims.attention_scale}


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    for layer in spec.layer_specs if dims.local_rope_theta is not None else ():
        attention = layer.submodules.self_attention
        attention.module, attention.params = TwoRopeAttention, {**attention.params, "dims": dims}


def _finish(dims: ModelDims, model: GPTModel) -> None:
    if dims.embedding_scale is None or not model.pre_process:
        return
    scale = torch.tensor(dims.embedding_scale)

    def scaled(embedding: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # transformers rounds the scale to the model's dtype first.
        return output * scale.to(output.device, output.dtype)

    model.embedding.register_forward_hook(scaled)


GEMMA3 = Variant(settings=_settings, adapt=_adapt, finish=_finish)
