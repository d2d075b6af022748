"""What of a model no argument of Megatron-LM says: a launch with its arguments alone would build another one."""

from __future__ import annotations

from collections.abc import Iterator

from converters.config.dims import ModelDims

# The name under which `model_arguments` lists these lines.
UNSAID = "no_argument_for"
# slime, miles and Megatron-LM 0.13 to 0.19 build GPTModel without --rope-scaling-factor, whose default this is.
# Source: slime and miles `megatron_utils/model_provider.py`, Megatron-LM `gpt_builders.py`.
LLAMA3_FACTOR = 8.0


def unsaid(dims: ModelDims) -> list[str]:
    """A line for each such part, with what builds it instead.

    Source: `training/arguments.py` of Megatron-LM 0.16 to 0.19, which has no option for `activation_func`,
    `gated_linear_unit` and `softmax_scale` of `TransformerConfig`; and `gpt_builders.py`, which hands `GPTModel` no
    `rope_scaling_factor`, so that it takes 8.
    """
    return [*_gate(dims), *_rope(dims), *_attention(dims), *_modules(dims)]


def _gate(dims: ModelDims) -> Iterator[str]:
    if dims.activation == "gelu_pytorch_tanh":
        yield (
            "the gated MLP of gelu's tanh approximation: set config.gated_linear_unit = True and "
            "config.activation_func = megatron.core.activations.fast_gelu (--swiglu is another gate)"
        )


def _rope(dims: ModelDims) -> Iterator[str]:
    if dims.rope_scaling is not None and dims.rope_scaling["rope_type"] == "llama3":
        if dims.rope_scaling["factor"] != LLAMA3_FACTOR:
            factor = f"rope scaling by {dims.rope_scaling['factor']:g} (--use-rope-scaling scales by {LLAMA3_FACTOR:g})"
            yield f"{factor}: hand rope_scaling_factor to GPTModel in gpt_builders.py"
        return
    if dims.local_rope_theta is None:
        return
    base = f"a rotary base of {dims.local_rope_theta:g} in layers with a window (--rotary-base is that of the others)"
    yield f"{base}: Megatron-Bridge's Gemma3RotaryEmbedding"
    if dims.rope_scaling is not None:
        factor = f"linear rope scaling by {dims.rope_scaling['factor']:g} in layers without a window"
        yield f"{factor}: rope_scaling_factor of Megatron-Bridge's Gemma3ModelProvider"


def _attention(dims: ModelDims) -> Iterator[str]:
    if dims.attention_scale is not None and dims.attention_scale != dims.head_dim**-0.5:
        usual = f"(else {dims.head_dim**-0.5}, of the head size)"
        yield f"the scale of attention: set config.softmax_scale = {dims.attention_scale} {usual}"
    if dims.query_scale_from is not None:
        scale = f"queries scaled by their position from token {dims.query_scale_from:,} on"
        yield f"{scale} (up to there Megatron computes the same model): Megatron-Bridge's attention for Ministral 3"
    if dims.qk_norm_full:
        norms = "query and key norms over all heads at once (--qk-layernorm has one a head)"
        yield f"{norms}: a layer spec of slime or Megatron-Bridge for this model"


def _modules(dims: ModelDims) -> Iterator[str]:
    if dims.embedding_scale is not None:
        yield f"embeddings times {dims.embedding_scale:g}: Megatron-Bridge's Gemma3LanguageModelEmbedding"
    if dims.sandwich == "linear":
        norms = "norms after attention and after the MLP, inside their last linear layers"
        yield f"{norms}: Megatron-Bridge's TERowParallelLinearLayerNorm"
