"""Works out expressions of a Python file; what needs more than its own data is not known, and keeps its source."""

from __future__ import annotations

import ast
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
    TooMuchPythonError,
    Unknown,
    is_known,
    join_pieces,
    merge_values,
    split_pieces,
)

# Calls a function: the callee, its arguments, those by name, and how the call is written.
Call = Callable[[State, Module, Any, Sequence[Any], Mapping[str, Any], ast.Call], Any]
_SHOWN, _MAX_ITEMS = 80, 10_000
_MAX_INTEGER = 2**63
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_METHODS = frozenset(
    {
        *("strip", "lstrip", "rstrip", "split", "join", "lower", "upper", "replace", "startswith", "endswith"),
        *("get", "items", "keys", "values", "removeprefix", "removesuffix", "title", "count", "index"),
    }
)


def unknown_expression(node: ast.AST, why: str) -> Unknown:
    """A value that is not known, as it is written."""
    source = " ".join(ast.unparse(node).split())
    return Unknown(source if len(source) <= _SHOWN else f"{source[:_SHOWN]}...", why)


class Environment:
    """`os.environ`: the variables that a launch starts with, and those that it sets. The state keeps them."""


def _searched(node: ast.Call, pattern: Any, text: Any) -> Any:
    """`re.search(pattern, text)`, of patterns that take no time: few repetitions, and none of a group."""
    if not (isinstance(pattern, str) and isinstance(text, str)):
        return unknown_expression(node, "it depends on a value that is not known")
    many = sum(pattern.count(sign) for sign in "*+{")
    if many > 2 or len(text) > 200 or re.search(r"\)[*+{?]", pattern):
        return unknown_expression(node, "a pattern that is not worked out here")
    return getattr(re, ast.unparse(node.func).rpartition(".")[2])(pattern, text)


def truth_of(value: Any) -> bool | None:
    """Whether a value counts as true; None where nobody can tell."""
    if isinstance(value, Text):
        return True if any(isinstance(piece, str) for piece in value.pieces) else None
    if isinstance(value, Unknown):
        return None
    if isinstance(value, Object | PythonFunction | Class | Module):
        return True
    return bool(value)


def _items_of(many: Any) -> list[Any]:
    """The items of a collection. Raises TooMuchPythonError for too many of them."""
    if isinstance(many, dict):
        return list(many)
    if len(many) > _MAX_ITEMS:
        raise TooMuchPythonError(f"a list of more than {_MAX_ITEMS} items")
    return list(many)


def _stripped(text: Text, how: str) -> Any:
    pieces = list(text.pieces)
    if how in ("strip", "lstrip") and isinstance(pieces[0], str):
        pieces[0] = pieces[0].lstrip()
    if how in ("strip", "rstrip") and isinstance(pieces[-1], str):
        pieces[-1] = pieces[-1].rstrip()
    return join_pieces(pieces)


def _range(*bounds: int) -> list[int]:
    if len(range(*bounds)) > _MAX_ITEMS:
        raise TooMuchPythonError(f"a range of more than {_MAX_ITEMS} numbers")
    return list(range(*bounds))


def _text(value: Any = "") -> Any:
    return join_pieces(split_pieces(value))


def _length(value: Any) -> Any:
    return len(value) if not isinstance(value, Unknown | Text) else Unknown("len(...)", "its length is not known")


# Those that take values of which not all is known.
_LENIENT = frozenset({"str", "len", "print", "list", "tuple", "dict", "items", "get", "strip", "lstrip", "rstrip"})
_BUILTINS: Mapping[str, Builtin] = {
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


class Expressions:
    """Works out expressions in the names of a state and a module; `call` follows functions."""

    def __init__(self, state: State, module: Module, call: Call) -> None:
        self.state, self.module, self.call = state, module, call

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, `Unknown` where it cannot be told."""
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
                return self._named(node, name)
            case ast.Attribute(value=inner, attr=name):
                return self._attribute(node, self.value(inner), name)
            case ast.BinOp(left=left, op=symbol, right=right):
                return self._binary(node, self.value(left), symbol, self.value(right))
            case ast.BoolOp(op=symbol, values=values):
                return self._either(node, isinstance(symbol, ast.Or), values)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                truth = truth_of(self.value(inner))
                return (
                    unknown_expression(node, "it depends on a value that is not known") if truth is None else not truth
                )
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                value = self.value(inner)
                return -value if is_known(value) else value
            case ast.Compare(left=left, ops=[symbol], comparators=[right]):
                return self._compared(node, self.value(left), symbol, self.value(right))
            case ast.IfExp(test=test, body=body, orelse=other):
                truth = truth_of(self.value(test))
                if truth is None:
                    why = f"it depends on `{unknown_expression(test, '').source}`, which is not known"
                    return merge_values(self.value(body), self.value(other), why)
                return self.value(body if truth else other)
            case ast.List(elts=elements) | ast.Set(elts=elements):
                return list(self._elements(elements))
            case ast.Tuple(elts=elements):
                return tuple(self._elements(elements))
            case ast.Dict():
                return self._dictionary(node)
            case ast.Subscript(value=inner, slice=index):
                return self._item(node, self.value(inner), index)
            case ast.Call():
                return self._called(node)
            case (
                ast.ListComp(elt=element, generators=[generator])
                | ast.GeneratorExp(elt=element, generators=[generator])
            ):
                return self._comprehension(node, element, generator)
            case ast.Lambda():
                return PythonFunction(node, self.module)
            case ast.NamedExpr(target=ast.Name(id=name), value=inner):
                self.state.frames[-1][name] = self.value(inner)
                return self.state.frames[-1][name]
        return unknown_expression(node, "it is not worked out here")

    def _formatted(self, part: ast.expr) -> tuple[Any, ...]:
        match part:
            case ast.Constant(value=constant):
                return (str(constant),)
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                value = self.value(inner)
                return (unknown_expression(inner, value.why),) if isinstance(value, Unknown) else split_pieces(value)
        return (unknown_expression(part, "a format that is not worked out here"),)

    def _named(self, node: ast.expr, name: str) -> Any:
        for names in (self.state.frames[-1], self.module.names):
            if name in names:
                value = names[name]
                return unknown_expression(node, value.why) if isinstance(value, Unknown) else value
        if name in _BUILTINS:
            return _BUILTINS[name]
        return unknown_expression(node, "it is not set in this file")

    def _attribute(self, node: ast.expr, value: Any, name: str) -> Any:
        if isinstance(value, Object):
            return self._of_object(node, value, name)
        if isinstance(value, Module):
            found = value.names.get(name, MISSING)
            return unknown_expression(node, found.why) if isinstance(found, Unknown) else found
        if isinstance(value, re.Match) and name in ("group", "groups"):
            return Builtin(name, getattr(value, name))
        if isinstance(value, Environment) and name in ("get", "getenv"):
            return Builtin("getenv", lambda one, default=None: self.state.variable(one, default))
        if isinstance(value, str | list | dict) and name in _METHODS:
            return Builtin(name, getattr(value, name))
        if isinstance(value, Text) and name in ("strip", "lstrip", "rstrip"):
            return Builtin(name, lambda: _stripped(value, name))
        if isinstance(value, Unknown):
            return unknown_expression(node, value.why)
        return unknown_expression(node, "an attribute that is not followed")

    def _of_object(self, node: ast.expr, value: Object, name: str) -> Any:
        """An attribute, a property or a method of an object."""
        attributes = self.state.objects[value.number]
        method = value.kind.methods.get(name)
        if name not in attributes and method is not None and isinstance(method.node, ast.FunctionDef):
            bound = PythonFunction(method.node, method.module, value)
            if any(ast.unparse(one).endswith("property") for one in method.node.decorator_list):
                call = ast.copy_location(ast.Call(node, [], []), node)
                return self.call(self.state, self.module, bound, [], {}, call)
            return bound
        found = attributes.get(name, MISSING)
        return unknown_expression(node, found.why) if isinstance(found, Unknown) else found

    def _binary(self, node: ast.expr, left: Any, symbol: ast.operator, right: Any) -> Any:
        texts = isinstance(left, str | Text | Unknown) and isinstance(right, str | Text | Unknown)
        both = isinstance(left, Unknown) and isinstance(right, Unknown)
        if isinstance(symbol, ast.Add) and texts and not both:
            return join_pieces((*split_pieces(left), *split_pieces(right)))
        if not (is_known(left) and is_known(right)) or type(symbol) not in _BINARY:
            reason = next(
                (value.why for value in (left, right) if isinstance(value, Unknown)), "not all of it is known"
            )
            return unknown_expression(node, reason)
        if isinstance(symbol, ast.Mult) and any(isinstance(value, str | list | tuple) for value in (left, right)):
            many, times = (left, right) if not isinstance(left, int) else (right, left)
            if len(many) * max(0, times) > _MAX_ITEMS:
                raise TooMuchPythonError("a list of more items than a model has layers")
        if isinstance(symbol, ast.Mod) and isinstance(left, str):
            return unknown_expression(node, "a format that is not worked out here")
        if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) + len(right) > _MAX_ITEMS:
            raise TooMuchPythonError(f"a list of more than {_MAX_ITEMS} items")
        result = _BINARY[type(symbol)](left, right)
        if isinstance(result, int) and abs(result) > _MAX_INTEGER:
            return unknown_expression(node, "a number that no option takes")
        return result

    def _either(self, node: ast.expr, is_or: bool, values: Sequence[ast.expr]) -> Any:
        """`and` and `or`, which stop at the first value that decides."""
        value: Any = None
        for one in values:
            value = self.value(one)
            truth = truth_of(value)
            if truth is None:
                return unknown_expression(node, "it depends on a value that is not known")
            if truth == is_or:
                return value
        return value

    def _compared(self, node: ast.expr, left: Any, symbol: ast.cmpop, right: Any) -> Any:
        if isinstance(symbol, ast.In | ast.NotIn) and isinstance(right, Environment):
            if isinstance(self.state.variable(left, None), Unknown):
                return unknown_expression(node, "it depends on a variable that is not known")
            return (left in self.state.objects[ENVIRONMENT]) == isinstance(symbol, ast.In)
        if isinstance(left, Text) and isinstance(symbol, ast.Is | ast.IsNot) and right is None:
            return isinstance(symbol, ast.IsNot)
        if not (is_known(left) and is_known(right)):
            return unknown_expression(node, "it depends on a value that is not known")
        return _COMPARED[type(symbol)](left, right)

    def _elements(self, elements: Sequence[ast.expr]) -> Iterator[Any]:
        for element in elements:
            if isinstance(element, ast.Starred):
                many = self.value(element.value)
                yield from (
                    _items_of(many) if is_known(many) else (unknown_expression(element, "a list that is not known"),)
                )
            else:
                yield self.value(element)

    def _dictionary(self, node: ast.Dict) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            known = self.value(value)
            if key is not None:
                found[self.value(key)] = known
            elif isinstance(known, dict):
                found |= known
            else:
                found[unknown_expression(value, "names that are not known")] = known
        return found

    def _item(self, node: ast.expr, value: Any, index: ast.expr) -> Any:
        if isinstance(index, ast.Slice):
            bounds = [None if one is None else self.value(one) for one in (index.lower, index.upper, index.step)]
            known = is_known(value) and is_known(bounds)
            return value[slice(*bounds)] if known else unknown_expression(node, "not all of it is known")
        at = self.value(index)
        if isinstance(value, Environment):
            return self.state.variable(at, unknown_expression(node, "the variable is not set"))
        if isinstance(value, Unknown | Text | Module | Object | Class) or not is_known(at):
            return unknown_expression(node, "it depends on a value that is not known")
        found = value[at]
        return unknown_expression(node, found.why) if isinstance(found, Unknown) else found

    def _called(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        arguments = list(self._elements(node.args))
        if ast.unparse(node.func) in ("re.search", "re.match", "re.fullmatch") and len(arguments) == 2:
            return _searched(node, *arguments)
        if ast.unparse(node.func) == "getattr" and isinstance(arguments[0], Object) and isinstance(arguments[1], str):
            found = self._of_object(node, arguments[0], arguments[1])
            absent = arguments[1] not in self.state.objects[arguments[0].number] and isinstance(found, Unknown)
            return arguments[2] if absent and arguments[2:] else found
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        more = [self.value(keyword.value) for keyword in node.keywords if not keyword.arg]
        for one in more:
            named |= one if isinstance(one, dict) else {}
        if isinstance(function, Builtin) and function.name == "join" and len(arguments) == 1:
            return self._joined(node, function, arguments[0])
        if isinstance(function, Builtin) and function.name not in _LENIENT:
            if not (is_known(arguments) and is_known(named)):
                return unknown_expression(node, "it depends on a value that is not known")
            if function.name == "replace" and sum(len(one) for one in arguments if isinstance(one, str)) > _SHOWN:
                return unknown_expression(node, "a change of a text that is not worked out here")
            result = function.call(*arguments, **named)
            if isinstance(result, str) and len(result) > MAX_CHARACTERS:
                raise TooMuchPythonError(f"a text has more than {MAX_CHARACTERS} characters")
            return result
        if isinstance(function, Builtin):
            return function.call(*arguments, **named)
        return self.call(self.state, self.module, function, arguments, named, node)

    def _joined(self, node: ast.expr, function: Builtin, many: Any) -> Any:
        """`" ".join(texts)`, of which some are not wholly known."""
        if isinstance(many, Unknown | Text):
            return unknown_expression(node, "a list that is not known")
        items = _items_of(many)
        if is_known(items) and sum(len(item) for item in items) < MAX_CHARACTERS:
            return function.call(items)
        between = function.call(["", ""])
        parts = [(*((between,) if number else ()), *split_pieces(item)) for number, item in enumerate(items)]
        return join_pieces(piece for part in parts for piece in part)

    def _comprehension(self, node: ast.expr, element: ast.expr, generator: ast.comprehension) -> Any:
        many = self.value(generator.iter)
        if isinstance(many, Unknown | Text) or not isinstance(generator.target, ast.Name | ast.Tuple):
            return unknown_expression(node, "a list that is not known")
        found, before = [], dict(self.state.frames[-1])
        for item in _items_of(many):
            self.bind(generator.target, item)
            truths = [truth_of(self.value(test)) for test in generator.ifs]
            if None in truths:
                return unknown_expression(node, "it depends on a value that is not known")
            if all(truths):
                found.append(self.value(element))
        self.state.frames[-1] = before
        return found

    def bind(self, target: ast.expr, value: Any) -> None:
        """Assigns to a name, an attribute of an object, or several of these."""
        match target:
            case ast.Name(id=name):
                self.state.frames[-1][name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                items = _items_of(value) if isinstance(value, list | tuple) and len(value) == len(targets) else None
                for number, one in enumerate(targets):
                    self.bind(one, items[number] if items else unknown_expression(target, "a value that is not known"))
            case ast.Attribute(value=inner, attr=name):
                if isinstance(object_ := self.value(inner), Object):
                    self.state.objects[object_.number][name] = value
            case ast.Subscript(value=inner, slice=index) if isinstance(self.value(inner), Environment):
                variables, at = self.state.objects[ENVIRONMENT], self.value(index)
                gap = unknown_expression(target, "a variable that is not known was set")
                for name in [at] if isinstance(at, str) else list(variables):
                    variables[name] = value if isinstance(at, str) and isinstance(value, str) else gap
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                before, at = self.value(ast.Name(name, ast.Load())), self.value(index)
                known = isinstance(before, dict) and is_known(at)
                self.state.frames[-1][name] = (
                    {**before, at: value} if known else Unknown(name, "an item that is not known was set")
                )
