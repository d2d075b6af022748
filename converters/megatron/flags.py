"""Megatron-LM arguments as the words of a launch script.

Source of the flags: Megatron-LM `megatron/training/arguments.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from converters.megatron.argument import Argument
from converters.megatron.argument_table import ARGUMENTS, BY_NAME
from converters.megatron.unsaid import UNSAID


def launch_flags(args: Mapping[str, Any]) -> list[str]:
    """Each argument as one line (`--num-layers 48`), quoted for a shell, without what is off or None by default.

    Comments say what no flag can: what `converters.megatron.unsaid` lists, and arguments without a flag.
    """
    flags = [" ".join([flag, *map(shlex.quote, values)]) for flag, values in _flags(args)]
    lines = [
        f"set args.{row.name} = {args[row.name]} (else {row.default}) before the model is built"
        for row in ARGUMENTS
        if row.printed == "comment" and args.get(row.name, row.default) != row.default
    ]
    return flags + [f"# no flag says this: {line}" for line in (*lines, *args.get(UNSAID, ()))]


def _flags(args: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    if args.get("group_query_attention"):
        yield "--group-query-attention", []
        yield "--num-query-groups", [str(args["num_query_groups"])]
    for name, value in args.items():
        row = BY_NAME.get(name) or Argument(name)
        if name == UNSAID or row.printed != "option" or value is None:
            continue
        if isinstance(value, bool):
            if value != bool(row.starts):
                yield next(option for option, sets in row.options.items() if sets is value), []
        elif isinstance(value, (list, tuple)):
            yield next(iter(row.options)), [pattern(value) if isinstance(value, list) else ",".join(map(str, value))]
        else:
            yield next(iter(row.options)), [str(value)]


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
