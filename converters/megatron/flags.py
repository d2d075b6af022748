"""Megatron-LM arguments as the words of a launch script.

Source of the flags: Megatron-LM `megatron/training/arguments.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from converters.blocks.latent_attention import WITHOUT_FLAG
from converters.megatron.unsaid import UNSAID

# What follows from the others, or is a choice of the run and not of the model.
_LEFT_OUT = {
    "add_position_embedding",
    "group_query_attention",
    "init_method_std",
    "num_query_groups",
    "padded_vocab_size",
    "rope_scaling_factor",  # no builder of Megatron hands it to the model: `unsaid` has it
    "seq_length",
    "tokenizer_type",
    "use_rotary_position_embeddings",
}
_NEGATED = {
    "add_bias_linear": "--disable-bias-linear",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
}


def launch_flags(args: Mapping[str, Any]) -> list[str]:
    """Each argument as one line (`--num-layers 48`), quoted for a shell, without what is off or None by default.

    Comments say what no flag can: what `converters.megatron.unsaid` lists, and arguments without a flag.
    """
    flags = [" ".join([flag, *map(shlex.quote, values)]) for flag, values in _flags(args)]
    lines = [
        f"set args.{name} = {args[name]} (else {default}) before the model is built"
        for name, default in WITHOUT_FLAG.items()
        if args.get(name, default) != default
    ]
    return flags + [f"# no flag says this: {line}" for line in (*lines, *args.get(UNSAID, ()))]


def _flags(args: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    if args.get("group_query_attention"):
        yield "--group-query-attention", []
        yield "--num-query-groups", [str(args["num_query_groups"])]
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if name in _LEFT_OUT or name in WITHOUT_FLAG or name == UNSAID or value is None:
            continue
        if name in _NEGATED:
            yield from [] if value else [(_NEGATED[name], [])]
        elif isinstance(value, bool):
            yield from [(flag, [])] if value else []
        elif isinstance(value, (list, tuple)):
            yield flag, [pattern(value) if isinstance(value, list) else ",".join(map(str, value))]
        else:
            yield flag, [str(value)]


def pattern(values: Sequence[int]) -> str:
    """One number a layer as the expression that Megatron evaluates, the shortest repetition: `([1]*3+[0]*1)*12`."""
    count = len(values)
    sizes = (size for size in range(1, count + 1) if count % size == 0)
    period = next(size for size in sizes if list(values[:size]) * (count // size) == list(values))
    runs = "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(values[:period]))
    repeated = count // period
    if period == 1:
        return f"([{values[0]}]*{count})"
    return f"({runs})" if repeated == 1 else f"(({runs})*{repeated})"
