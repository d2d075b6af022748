"""Gemma 3's gated MLP, for which Megatron-LM has no argument.

What Megatron-Bridge's model provider adds (`models/gemma/gemma3_provider.py`) has no parameters: another rotary base in
layers with a window, scaled embeddings, and a gate of gelu's tanh approximation.
"""

from __future__ import annotations

from verify.witnesses.megatron.variants.variant import Variant

GEMMA3 = Variant(settings=lambda dims: {"gated_linear_unit": True} if dims.activation == "gelu_pytorch_tanh" else {})
