"""Evaluates expressions of a Python file; one that needs more than data of the file is `Unknown`, with its source."""

from __future__ import annotations

import ast
import builtins
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckptkit.verify.launch.python.values import (
    ENVIRONMENT,
    MAX_CHARACTERS,
    MISSING,
    Builtin,
    Class,
    Module,
    Object,
    PythonFunction,
    State,
    Text,
    TooMuchError,
    Unknown,
    is_known,
    join_pieces,
    merge_values,
    split_pieces,
)

# Calls a function with positional arguments, named arguments, and the syntax of the call.
Call = Callable[[State, Any, Sequence[Any], Mapping[str, Any], ast.Call], Any]
_SHOWN, _MAX_ITEMS = 80, 10_000
_MAX_INTEGER = 2**63
_NOT_KNOWN = "it depends on an unknown value"
_NO_LIST = "the list is unknown"
_NO_LENGTH = Unknown("len(...)", "its length is unknown")
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_METHODS = (
    *("strip", "lstrip", "rstrip", "split", "join", "lower", "upper", "replace", "startswith", "endswith"),
    *("get", "items", "keys", "values", "removeprefix", "removesuffix", "title", "count", "index"),
)


def unknown_expression(node: ast.AST, why: str) -> Unknown:
    """An unknown value with the source of its expression."""
    source = " ".join(ast.unparse(node).split())
    return Unknown(source if len(source) <= _SHOWN else f"{source[:_SHOWN]}...", why)


def _with_source(node: ast.AST, value: Any) -> Any:
    """The value of a name or item; an unknown one gets the source of the expression."""
    return unknown_expression(node, value.why) if isinstance(value, Unknown) else value


class Environment:
    """`os.environ`, with its variables in the state."""


def _search(node: ast.Call, pattern: Any, text: Any) -> Any:
    """`re.search(pattern, text)` for fast patterns: at most two repetitions, and none of a group."""
    if not (isinstance(pattern, str) and isinstance(text, str)):
        return unknown_expression(node, _NOT_KNOWN)
    if sum(map(pattern.count, "*+{")) > 2 or len(text) > 200 or re.search(r"\)[*+{?]", pattern):
        return unknown_expression(node, "ckptkit does not evaluate this pattern")
    return getattr(re, ast.unparse(node.func).rpartition(".")[2])(pattern, text)


def truth_of(value: Any) -> bool | None:
    """The truth of a value, or None if it is unknown."""
    if isinstance(value, Text):
        return True if any(isinstance(piece, str) for piece in value.pieces) else None
    if isinstance(value, Unknown):
        return None
    if isinstance(value, Object | PythonFunction | Class | Module):
        return True
    return bool(value)


def _items(collection: Any) -> list[Any]:
    """The items of a collection. Raises TooMuchError for a list that is too long."""
    if not isinstance(collection, dict) and len(collection) > _MAX_ITEMS:
        raise TooMuchError(f"a list of more than {_MAX_ITEMS} items")
    return list(collection)


def _strip(text: Text, method: str) -> Any:
    pieces = list(text.pieces)
    if method in ("strip", "lstrip") and isinstance(pieces[0], str):
        pieces[0] = pieces[0].lstrip()
    if method in ("strip", "rstrip") and isinstance(pieces[-1], str):
        pieces[-1] = pieces[-1].rstrip()
    return join_pieces(pieces)


def _range(*bounds: int) -> list[int]:
    if len(range(*bounds)) > _MAX_ITEMS:
        raise TooMuchError(f"a range of more than {_MAX_ITEMS} numbers")
    return list(range(*bounds))


# Functions and methods that accept unknown values.
_LENIENT = frozenset({"str", "len", "print", "list", "tuple", "dict", "items", "get", "strip", "lstrip", "rstrip"})
_PLAIN = ("int", "float", "bool", "min", "max", "sum", "abs", "round", "sorted", "any", "all")
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in _PLAIN},
    "str": lambda value="": join_pieces(split_pieces(value)),
    "len": lambda value: _NO_LENGTH if isinstance(value, Unknown | Text) else len(value),
    "range": _range,
    "list": lambda items=(), /: items if isinstance(items, Unknown) else list(items),
    "tuple": lambda items=(), /: items if isinstance(items, Unknown) else tuple(items),
    "print": lambda *_, **__: None,
}
_BUILTINS = {name: Builtin(name, call) for name, call in _FUNCTIONS.items()}


class Expressions:
    """Evaluates expressions with the names of a state and a module; `call` follows functions."""

    def __init__(self, state: State, module: Module, call: Call) -> None:
        self.state, self.module, self.call = state, module, call

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or `Unknown`."""
        self.state.step()
        try:
            return self._value(node)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            return unknown_expression(node, f"{type(error).__name__}: {error}")

    def _value(self, node: ast.expr) -> Any:  # noqa: C901, PLR0912 - a case for each kind of expression
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.JoinedStr(values=parts):
                return join_pieces(piece for part in parts for piece in self._formatted(part))
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.Attribute(value=inner, attr=name):
                return self._attribute(node, self.value(inner), name)
            case ast.BinOp(left=left, op=symbol, right=right):
                return self._binary(node, self.value(left), symbol, self.value(right))
            case ast.BoolOp(op=symbol, values=values):
                return self._and_or(node, isinstance(symbol, ast.Or), values)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                truth = truth_of(self.value(inner))
                return unknown_expression(node, _NOT_KNOWN) if truth is None else not truth
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                value = self.value(inner)
                return -value if is_known(value) else value
            case ast.Compare(left=left, ops=[symbol], comparators=[right]):
                return self._compare(node, self.value(left), symbol, self.value(right))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                truth = truth_of(self.value(test))
                if truth is None:
                    why = f"it depends on `{unknown_expression(test, '').source}`, which is unknown"
                    return merge_values(self.value(body), self.value(orelse), why)
                return self.value(body if truth else orelse)
            case ast.List(elts=elements) | ast.Set(elts=elements):
                return list(self._elements(elements))
            case ast.Tuple(elts=elements):
                return tuple(self._elements(elements))
            case ast.Dict():
                return self._dictionary(node)
            case ast.Subscript(value=inner, slice=index):
                return self._item(node, self.value(inner), index)
            case ast.Call():
                return self._call(node)
            case ast.ListComp(element, [generator]) | ast.GeneratorExp(element, [generator]):
                return self._comprehension(node, element, generator)
            case ast.Lambda():
                return PythonFunction(node, self.module)
            case ast.NamedExpr(target=ast.Name(id=name), value=inner):
                value = self.state.frames[-1][name] = self.value(inner)
                return value
        return unknown_expression(node, "ckptkit does not evaluate it")

    def _formatted(self, part: ast.expr) -> tuple[Any, ...]:
        match part:
            case ast.Constant(value=constant):
                return (str(constant),)
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                value = self.value(inner)
                return (unknown_expression(inner, value.why),) if isinstance(value, Unknown) else split_pieces(value)
        return (unknown_expression(part, "ckptkit does not evaluate this format"),)

    def _name(self, node: ast.expr, name: str) -> Any:
        for names in (self.state.frames[-1], self.module.names):
            if name in names:
                return _with_source(node, names[name])
        return _BUILTINS[name] if name in _BUILTINS else unknown_expression(node, "it is not set in this file")

    def _attribute(self, node: ast.expr, value: Any, name: str) -> Any:
        if isinstance(value, Object):
            return self._object_attribute(node, value, name)
        if isinstance(value, Module):
            return _with_source(node, value.names.get(name, MISSING))
        if isinstance(value, re.Match) and name in ("group", "groups"):
            return Builtin(name, getattr(value, name))
        if isinstance(value, Environment) and name in ("get", "getenv"):
            return Builtin("getenv", lambda variable, default=None: self.state.variable(variable, default))
        if isinstance(value, str | list | dict) and name in _METHODS:
            return Builtin(name, getattr(value, name))
        if isinstance(value, Text) and name in ("strip", "lstrip", "rstrip"):
            return Builtin(name, lambda: _strip(value, name))
        why = value.why if isinstance(value, Unknown) else "ckptkit does not evaluate this attribute"
        return unknown_expression(node, why)

    def _object_attribute(self, node: ast.expr, value: Object, name: str) -> Any:
        attributes = self.state.objects[value.number]
        method = value.kind.methods.get(name)
        if name not in attributes and method is not None and isinstance(method.node, ast.FunctionDef):
            bound = PythonFunction(method.node, method.module, value)
            if any(ast.unparse(decorator).endswith("property") for decorator in method.node.decorator_list):
                return self.call(self.state, bound, [], {}, ast.copy_location(ast.Call(node, [], []), node))
            return bound
        return _with_source(node, attributes.get(name, MISSING))

    def _binary(self, node: ast.expr, left: Any, symbol: ast.operator, right: Any) -> Any:
        texts = isinstance(left, str | Text | Unknown) and isinstance(right, str | Text | Unknown)
        if isinstance(symbol, ast.Add) and texts and not (isinstance(left, Unknown) and isinstance(right, Unknown)):
            return join_pieces((*split_pieces(left), *split_pieces(right)))
        if not (is_known(left) and is_known(right)) or type(symbol) not in _ARITHMETIC:
            reasons = (value.why for value in (left, right) if isinstance(value, Unknown))
            return unknown_expression(node, next(reasons, "a part of it is unknown"))
        if isinstance(symbol, ast.Mult) and any(isinstance(value, str | list | tuple) for value in (left, right)):
            items, times = (left, right) if not isinstance(left, int) else (right, left)
            if len(items) * max(0, times) > _MAX_ITEMS:
                raise TooMuchError("a list of more items than a model has layers")
        if isinstance(symbol, ast.Mod) and isinstance(left, str):
            return unknown_expression(node, "ckptkit does not evaluate this format")
        if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) + len(right) > _MAX_ITEMS:
            raise TooMuchError(f"a list of more than {_MAX_ITEMS} items")
        result = _ARITHMETIC[type(symbol)](left, right)
        if isinstance(result, int) and abs(result) > _MAX_INTEGER:
            return unknown_expression(node, "no option accepts such a number")
        return result

    def _and_or(self, node: ast.expr, is_or: bool, operands: Sequence[ast.expr]) -> Any:
        """`and` and `or`, which stop at the first operand that decides."""
        value: Any = None
        for operand in operands:
            value = self.value(operand)
            truth = truth_of(value)
            if truth is None:
                return unknown_expression(node, _NOT_KNOWN)
            if truth == is_or:
                return value
        return value

    def _compare(self, node: ast.expr, left: Any, symbol: ast.cmpop, right: Any) -> Any:
        if isinstance(symbol, ast.In | ast.NotIn) and isinstance(right, Environment):
            if isinstance(self.state.variable(left, None), Unknown):
                return unknown_expression(node, "it depends on an unknown variable")
            return (left in self.state.objects[ENVIRONMENT]) == isinstance(symbol, ast.In)
        if isinstance(left, Text) and isinstance(symbol, ast.Is | ast.IsNot) and right is None:
            return isinstance(symbol, ast.IsNot)
        if not (is_known(left) and is_known(right)):
            return unknown_expression(node, _NOT_KNOWN)
        return _COMPARISONS[type(symbol)](left, right)

    def _elements(self, elements: Sequence[ast.expr]) -> Iterator[Any]:
        for element in elements:
            if isinstance(element, ast.Starred):
                items = self.value(element.value)
                yield from _items(items) if is_known(items) else (unknown_expression(element, _NO_LIST),)
            else:
                yield self.value(element)

    def _dictionary(self, node: ast.Dict) -> Any:
        items: dict[Any, Any] = {}
        for key, expression in zip(node.keys, node.values, strict=True):
            value = self.value(expression)
            if key is not None:
                items[self.value(key)] = value
            elif isinstance(value, dict):
                items |= value
            else:
                items[unknown_expression(expression, "unknown names")] = value
        return items

    def _item(self, node: ast.expr, value: Any, index: ast.expr) -> Any:
        if isinstance(index, ast.Slice):
            bounds = [bound and self.value(bound) for bound in (index.lower, index.upper, index.step)]
            known = is_known(value) and is_known(bounds)
            return value[slice(*bounds)] if known else unknown_expression(node, "a part of it is unknown")
        at = self.value(index)
        if isinstance(value, Environment):
            return self.state.variable(at, unknown_expression(node, "the variable is not set"))
        if isinstance(value, Unknown | Text | Module | Object | Class) or not is_known(at):
            return unknown_expression(node, _NOT_KNOWN)
        return _with_source(node, value[at])

    def _call(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        arguments = list(self._elements(node.args))
        if ast.unparse(node.func) in ("re.search", "re.match", "re.fullmatch") and len(arguments) == 2:
            return _search(node, *arguments)
        if ast.unparse(node.func) == "getattr" and isinstance(arguments[0], Object) and isinstance(arguments[1], str):
            value = self._object_attribute(node, arguments[0], arguments[1])
            is_absent = arguments[1] not in self.state.objects[arguments[0].number] and isinstance(value, Unknown)
            return arguments[2] if is_absent and arguments[2:] else value
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        for value in [self.value(keyword.value) for keyword in node.keywords if not keyword.arg]:
            named |= value if isinstance(value, dict) else {}
        if not isinstance(function, Builtin):
            return self.call(self.state, function, arguments, named, node)
        if function.name == "join" and len(arguments) == 1:
            return self._join(node, function, arguments[0])
        if function.name in _LENIENT:
            return function.call(*arguments, **named)
        if not (is_known(arguments) and is_known(named)):
            return unknown_expression(node, _NOT_KNOWN)
        if function.name == "replace" and sum(len(text) for text in arguments if isinstance(text, str)) > _SHOWN:
            return unknown_expression(node, "ckptkit does not evaluate this change of a text")
        result = function.call(*arguments, **named)
        if isinstance(result, str) and len(result) > MAX_CHARACTERS:
            raise TooMuchError(f"a text has more than {MAX_CHARACTERS} characters")
        return result

    def _join(self, node: ast.expr, function: Builtin, texts: Any) -> Any:
        """`" ".join(texts)`, also for texts with unknown parts."""
        if isinstance(texts, Unknown | Text):
            return unknown_expression(node, _NO_LIST)
        items = _items(texts)
        if is_known(items) and sum(len(item) for item in items) < MAX_CHARACTERS:
            return function.call(items)
        separator = function.call(["", ""])
        parts = [(*((separator,) if number else ()), *split_pieces(item)) for number, item in enumerate(items)]
        return join_pieces(piece for part in parts for piece in part)

    def _comprehension(self, node: ast.expr, element: ast.expr, generator: ast.comprehension) -> Any:
        items = self.value(generator.iter)
        if isinstance(items, Unknown | Text) or not isinstance(generator.target, ast.Name | ast.Tuple):
            return unknown_expression(node, _NO_LIST)
        values, before = [], dict(self.state.frames[-1])
        for item in _items(items):
            self.bind(generator.target, item)
            truths = [truth_of(self.value(test)) for test in generator.ifs]
            if None in truths:
                return unknown_expression(node, _NOT_KNOWN)
            if all(truths):
                values.append(self.value(element))
        self.state.frames[-1] = before
        return values

    def bind(self, target: ast.expr, value: Any) -> None:
        """Assigns to a name, an attribute of an object, an item, or several of these."""
        match target:
            case ast.Name(id=name):
                self.state.frames[-1][name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                items = _items(value) if isinstance(value, list | tuple) and len(value) == len(targets) else None
                for number, part in enumerate(targets):
                    self.bind(part, items[number] if items else unknown_expression(target, "an unknown value"))
            case ast.Attribute(value=inner, attr=name):
                if isinstance(object_ := self.value(inner), Object):
                    self.state.objects[object_.number][name] = value
            case ast.Subscript(value=inner, slice=index) if isinstance(self.value(inner), Environment):
                variables, at = self.state.objects[ENVIRONMENT], self.value(index)
                gap = unknown_expression(target, "an unknown variable was set")
                for name in [at] if isinstance(at, str) else list(variables):
                    variables[name] = value if isinstance(at, str) and isinstance(value, str) else gap
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                before, at = self.value(ast.Name(name, ast.Load())), self.value(index)
                unknown = Unknown(name, "an unknown item was set")
                is_item = isinstance(before, dict) and is_known(at)
                self.state.frames[-1][name] = {**before, at: value} if is_item else unknown
