"""Numbers and lists of numbers in Python syntax: `[1]*3+[0]`, `list(range(0,8))`."""

from __future__ import annotations

import ast
from typing import Any

_MAX_ITEMS, _MAX_NUMBER = 1 << 15, 1 << 31
_TOO_MANY = f"more than {_MAX_ITEMS} numbers, or a number above {_MAX_NUMBER}"


def numbers(text: str) -> Any:
    """The value of such an expression; nothing is executed. Raises ValueError for any other text."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("neither a number nor a list of numbers") from error


def _evaluate(node: ast.expr) -> Any:
    value: Any
    match node:
        case ast.Constant(value=int(number)):
            value = number
        case ast.List(elts=elements):
            value = [int(_evaluate(element)) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            value = _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if _size(first) * _size(second) > _MAX_ITEMS:
                raise ValueError(_TOO_MANY)
            value = first * second
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]):
            value = range(*map(_evaluate, arguments))
        case ast.Call(func=ast.Name(id="list"), args=[argument], keywords=[]):
            value = list(_evaluate(argument))
        case _:
            raise ValueError(f"{ast.unparse(node)}: neither a number nor a list of numbers")
    if _size(value) > (_MAX_NUMBER if isinstance(value, int) else _MAX_ITEMS):
        raise ValueError(_TOO_MANY)
    return value


def _size(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(value)
