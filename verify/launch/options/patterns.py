"""One number a layer, as launch scripts write it: `[0]*3+[1]*89`, `([1]*3+[0])*12`, `2`."""

from __future__ import annotations

import ast
import re

_MAX_LAYERS = 10_000
_CHARACTERS = re.compile(r"[\[\]\d+*(), ]*")


def frequency(text: str) -> int | list[int]:
    """A whole number, or the list that an expression of lists, `+` and `*` is.

    Source: Megatron-LM `_eval_pattern`, which evaluates text of these characters. Raises ValueError for any other.
    """
    if "[" not in text:
        return int(text)
    if len(text) > 10 * _MAX_LAYERS or not _CHARACTERS.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of numbers")
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a list of numbers") from error
    if isinstance(value, int):
        raise ValueError(f"{text!r} is not a list of numbers")
    return value


def _evaluated(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=elements):
            values = [_evaluated(element) for element in elements]
            return [value for value in values if isinstance(value, int)] if len(values) <= _MAX_LAYERS else _refuse()
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _added(_evaluated(left), _evaluated(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _repeated(_evaluated(left), _evaluated(right))
    return _refuse()


def _added(one: int | list[int], other: int | list[int]) -> int | list[int]:
    if isinstance(one, list) and isinstance(other, list) and len(one) + len(other) <= _MAX_LAYERS:
        return one + other
    return one + other if isinstance(one, int) and isinstance(other, int) else _refuse()


def _repeated(one: int | list[int], other: int | list[int]) -> int | list[int]:
    if isinstance(one, int) and isinstance(other, int):
        return one * other if abs(one * other) <= _MAX_LAYERS else _refuse()
    values, times = (one, other) if isinstance(one, list) else (other, one)
    if isinstance(values, list) and isinstance(times, int) and len(values) * times <= _MAX_LAYERS:
        return values * times
    return _refuse()


def _refuse() -> list[int]:
    raise ValueError("no list of numbers that a model has layers for")


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, in parentheses or not. Raises ValueError for anything else."""
    return tuple(int(part) for part in text.strip("()").split(","))
