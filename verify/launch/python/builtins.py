"""What expressions call: Python's own functions of known values, collections within limits, patterns, truth."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from verify.launch.python.values import (
    Builtin,
    Class,
    Function,
    Module,
    Object,
    Text,
    TooMuchPythonError,
    Unknown,
    pieces_of,
    text_of,
)

MAX_ITEMS = 10_000
_SHOWN = 80


def unknown(node: ast.AST, why: str) -> Unknown:
    """A value that is not known, as it is written."""
    source = " ".join(ast.unparse(node).split())
    return Unknown(source if len(source) <= _SHOWN else f"{source[:_SHOWN]}...", why)


class Environment:
    """`os.environ`: the variables that a launch starts with, and those that it sets. The state keeps them."""


def searched(node: ast.Call, pattern: Any, text: Any) -> Any:
    """`re.search(pattern, text)`, of patterns that take no time: few repetitions, and none of a group."""
    if not (isinstance(pattern, str) and isinstance(text, str)):
        return unknown(node, "it depends on a value that is not known")
    many = sum(pattern.count(sign) for sign in "*+{")
    if many > 2 or len(text) > 200 or re.search(r"\)[*+{?]", pattern):
        return unknown(node, "a pattern that is not worked out here")
    return getattr(re, ast.unparse(node.func).rpartition(".")[2])(pattern, text)


def truth_of(value: Any) -> bool | None:
    """Whether a value counts as true; None where nobody can tell."""
    if isinstance(value, Text):
        return True if any(isinstance(piece, str) for piece in value.pieces) else None
    if isinstance(value, Unknown):
        return None
    if isinstance(value, Object | Function | Class | Module):
        return True
    return bool(value)


def items_of(many: Any) -> list[Any]:
    """The items of a collection. Raises TooMuchPythonError for too many of them."""
    if isinstance(many, dict):
        return list(many)
    if len(many) > MAX_ITEMS:
        raise TooMuchPythonError(f"a list of more than {MAX_ITEMS} items")
    return list(many)


def stripped(text: Text, how: str) -> Any:
    pieces = list(text.pieces)
    if how in ("strip", "lstrip") and isinstance(pieces[0], str):
        pieces[0] = pieces[0].lstrip()
    if how in ("strip", "rstrip") and isinstance(pieces[-1], str):
        pieces[-1] = pieces[-1].rstrip()
    return text_of(pieces)


def _range(*bounds: int) -> list[int]:
    if len(range(*bounds)) > MAX_ITEMS:
        raise TooMuchPythonError(f"a range of more than {MAX_ITEMS} numbers")
    return list(range(*bounds))


def _text(value: Any = "") -> Any:
    return text_of(pieces_of(value))


def _length(value: Any) -> Any:
    return len(value) if not isinstance(value, Unknown | Text) else Unknown("len(...)", "its length is not known")


# Those that take values of which not all is known.
LENIENT = frozenset({"str", "len", "print", "list", "tuple", "dict", "items", "get", "strip", "lstrip", "rstrip"})
BUILTINS: Mapping[str, Builtin] = {
    "int": Builtin("int", int),
    "float": Builtin("float", float),
    "bool": Builtin("bool", bool),
    "str": Builtin("str", _text),
    "len": Builtin("len", _length),
    "min": Builtin("min", min),
    "max": Builtin("max", max),
    "sum": Builtin("sum", sum),
    "abs": Builtin("abs", abs),
    "round": Builtin("round", round),
    "sorted": Builtin("sorted", sorted),
    "any": Builtin("any", any),
    "all": Builtin("all", all),
    "range": Builtin("range", _range),
    "list": Builtin("list", lambda many=(): many if isinstance(many, Unknown) else list(many)),
    "tuple": Builtin("tuple", lambda many=(): many if isinstance(many, Unknown) else tuple(many)),
    "print": Builtin("print", lambda *_, **__: None),
}
