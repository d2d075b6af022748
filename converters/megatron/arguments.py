"""Computes the Megatron-LM arguments of a model, and formats them for a launch script.

Source of the flags: Megatron-LM `megatron/training/arguments.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.argument import Argument, of_model
from ckptkit.converters.megatron.argument_table import ARGUMENTS, BY_NAME
from ckptkit.converters.megatron.argument_values import refuse_inexpressible
from ckptkit.converters.megatron.hybrid_model import hybrid_args
from ckptkit.core.errors import CkptkitError


def megatron_args(dims: ModelDims, dialect: str = "mcore") -> dict[str, Any]:
    """Megatron-LM arguments (argparse names) of this model, like a training run stores them.

    Only plain values, which the restricted loaders of every Megatron version accept. Linear and sparse attention have
    no arguments in slime's dialect: its modules read their sizes from the HF config. A model that only HybridModel
    supports has HybridModel's arguments in every dialect. Raises CkptkitError for a model that Megatron has no
    arguments for, such as an unknown rope scaling, and in the dialect "hybrid" if HybridModel does not support it.
    """
    refuse_inexpressible(dims)
    args = {
        row.name: of_model(row.value, dims)
        for row in ARGUMENTS
        if row.value is not None and of_model(row.when, dims) and (dialect != "slime" or not row.own_modules)
    }
    return hybrid_args(args, dims) if dialect == "hybrid" or dims.pattern else args


def comparable_args(dims: ModelDims) -> dict[str, Any]:
    """Like `megatron_args`, but omits a rope scaling without arguments; for comparing two models."""
    try:
        return megatron_args(dims)
    except CkptkitError:
        return megatron_args(replace(dims, rope_scaling=None))


def launch_flags(args: Mapping[str, Any]) -> list[str]:
    """Each argument as one line (`--num-layers 48`), quoted for a shell, without switches that are off and None values.

    Arguments without a flag and the lines of `inexpressible` are comments.
    """
    flags = [" ".join([flag, *map(shlex.quote, values)]) for flag, values in _flags(args)]
    lines = [
        f"set args.{row.name} = {args[row.name]} (default {row.default}) before the model is built"
        for row in ARGUMENTS
        if row.printed == "comment" and args.get(row.name, row.default) != row.default
    ]
    return flags + [f"# no flag for this: {line}" for line in (*lines, *args.get(NO_ARGUMENT_KEY, ()))]


def _flags(args: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    if args.get("group_query_attention"):
        yield "--group-query-attention", []
        yield "--num-query-groups", [str(args["num_query_groups"])]
    for name, value in args.items():
        row = BY_NAME.get(name) or Argument(name)
        if name == NO_ARGUMENT_KEY or row.printed != "option" or value is None:
            continue
        if isinstance(value, bool):
            if value != bool(row.starts):
                yield next(option for option, sets in row.options.items() if sets is value), []
        elif isinstance(value, (list, tuple)):
            yield next(iter(row.options)), [pattern(value) if isinstance(value, list) else ",".join(map(str, value))]
        else:
            yield next(iter(row.options)), [str(value)]


def pattern(values: Sequence[int]) -> str:
    """One number per layer as Megatron's expression with the shortest repetition: `([1]*3+[0]*1)*12`."""
    count = len(values)
    sizes = (size for size in range(1, count + 1) if count % size == 0)
    period = next(size for size in sizes if list(values[:size]) * (count // size) == list(values))
    runs = "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(values[:period]))
    repeated = count // period
    if period == 1:
        return f"([{values[0]}]*{count})"
    return f"({runs})" if repeated == 1 else f"(({runs})*{repeated})"


# The name under which `model_arguments` lists these lines.
NO_ARGUMENT_KEY = "no_argument_for"
# The default factor. slime, miles and Megatron-LM 0.13 to 0.19 do not pass --rope-scaling-factor to GPTModel.
# Source: slime and miles `megatron_utils/model_provider.py`, Megatron-LM `gpt_builders.py`.
LLAMA3_FACTOR = 8.0


def inexpressible(dims: ModelDims) -> list[str]:
    """A line for each feature of the model without Megatron-LM arguments, and the way to build it.

    Source: `training/arguments.py` of Megatron-LM 0.16 to 0.19, which has no option for `activation_func`,
    `gated_linear_unit` and `softmax_scale` of `TransformerConfig`; and `gpt_builders.py`, which does not pass
    `rope_scaling_factor` to `GPTModel`, which then uses 8.
    """
    return [*_gate(dims), *_rope(dims), *_attention(dims), *_modules(dims)]


def _gate(dims: ModelDims) -> Iterator[str]:
    if dims.activation == "gelu_pytorch_tanh":
        yield (
            "the gated MLP of gelu's tanh approximation: set config.gated_linear_unit = True and "
            "config.activation_func = megatron.core.activations.fast_gelu (--swiglu sets another gate)"
        )


def _rope(dims: ModelDims) -> Iterator[str]:
    if dims.rope_scaling is not None and dims.rope_scaling["rope_type"] == "llama3":
        if dims.rope_scaling["factor"] != LLAMA3_FACTOR:
            factor = f"rope scaling by {dims.rope_scaling['factor']:g} (--use-rope-scaling scales by {LLAMA3_FACTOR:g})"
            yield f"{factor}: pass rope_scaling_factor to GPTModel in gpt_builders.py"
        return
    if dims.local_rope_theta is None:
        return
    base = f"a rotary base of {dims.local_rope_theta:g} in sliding-window layers (--rotary-base is for the others)"
    yield f"{base}: use Megatron-Bridge's Gemma3RotaryEmbedding"
    if dims.rope_scaling is not None:
        factor = f"linear rope scaling by {dims.rope_scaling['factor']:g} in full-attention layers"
        yield f"{factor}: set rope_scaling_factor of Megatron-Bridge's Gemma3ModelProvider"


def _attention(dims: ModelDims) -> Iterator[str]:
    if dims.attention_scale is not None and dims.attention_scale != dims.head_dim**-0.5:
        usual = f"(default {dims.head_dim**-0.5}, from the head size)"
        yield f"the scale of attention: set config.softmax_scale = {dims.attention_scale} {usual}"
    if dims.query_scale_from is not None:
        scale = f"queries scaled by their position from token {dims.query_scale_from:,} on"
        yield f"{scale} (Megatron computes shorter contexts alike): use Megatron-Bridge's attention for Ministral 3"
    if dims.qk_norm_full:
        norms = "query and key norms over all heads at once (--qk-layernorm has one per head)"
        yield f"{norms}: use a layer spec of slime or Megatron-Bridge for this model"


def _modules(dims: ModelDims) -> Iterator[str]:
    if dims.embedding_scale is not None:
        yield f"embeddings times {dims.embedding_scale:g}: use Megatron-Bridge's Gemma3LanguageModelEmbedding"
    if dims.sandwich == "linear":
        norms = "norms after attention and after the MLP, inside their last linear layers"
        yield f"{norms}: use Megatron-Bridge's TERowParallelLinearLayerNorm"
