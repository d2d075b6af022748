"""Follows the statements of a Python file: assignments, conditions, loops over data, functions and dataclasses."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ckptkit.core.isolation import HIDDEN, is_secret
from ckptkit.storage.regular import read_regular
from ckptkit.verify.launch.python.expressions import Environment, Expressions, truth_of, unknown_expression
from ckptkit.verify.launch.python.values import (
    ENVIRONMENT,
    MISSING,
    Builtin,
    Class,
    Module,
    Object,
    PythonFunction,
    State,
    Text,
    Unknown,
    is_known,
    merge_states,
    merge_values,
)
from ckptkit.verify.launch.words import UnfollowedCall

# The end of a block of statements, and the returned value. "" is the normal end; "unsure" means that a round of a loop
# may have ended early. A returned value of `MISSING` is one of `Follower.returned`.
End = tuple[Literal["", "return", "raise", "break", "continue", "unsure"], Any]
_MAX_BYTES = 300_000
# Functions that do not change their arguments.
_PURE = frozenset({"partial", "Path", "isinstance", "hasattr", "getattr", "asdict", "replace", "repr", "type", "print"})
_IGNORED = (ast.Pass, ast.Assert, ast.Global, ast.Nonlocal, ast.ClassDef, ast.FunctionDef)


@dataclass
class Follower:
    """Follows files below `root`. `watched` has callbacks, by function name, that replace calls."""

    root: Path
    environment: Mapping[str, Any]
    watched: Mapping[str, Callable[[State, Sequence[Any], Mapping[str, Any], ast.Call], Any]]
    modules: dict[Path, Module] = field(default_factory=dict)
    state: State = field(default_factory=State)
    # For each active function: the states and values of its undecidable returns, with the reason.
    returned: list[list[tuple[State, Any, str]]] = field(default_factory=lambda: [[]])

    def __post_init__(self) -> None:
        self.state.objects[ENVIRONMENT] = {
            name: Unknown(f"${name}", HIDDEN) if isinstance(value, str) and is_secret(name, value) else value
            for name, value in self.environment.items()
        }

    def module(self, path: Path) -> Module:
        """The names of a file. Raises OSError or SyntaxError if it cannot be read."""
        path = path.resolve()
        if path in self.modules:
            return self.modules[path]
        module = self.modules[path] = Module(path)
        module.names["__file__"] = str(path)
        module.names["__name__"] = "__main__" if len(self.modules) == 1 else path.stem
        text = read_regular(path, _MAX_BYTES).decode(errors="replace")
        self.state.step(len(text) // 100)
        for statement in ast.parse(text).body:
            self._module_statement(module, statement)
        return module

    def _module_statement(self, module: Module, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                module.names.update(self._imports(module, statement))
            case ast.FunctionDef(name=name):
                module.names[name] = PythonFunction(statement, module)
            case ast.ClassDef(name=name):
                module.names[name] = self._class(module, statement)
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                pass
            case _:
                before, self.state.frames = self.state.frames, [module.names]
                self.block(module, [statement])
                module.names.update(self.state.frames[0])
                self.state.frames = before

    def _imports(self, module: Module, statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Any]]:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                name = alias.asname or alias.name.partition(".")[0]
                yield name, self._import(module, alias.name if alias.asname else name)
                continue
            value = self._import(module, f"{statement.module}.{alias.name}")
            if isinstance(value, Unknown) and isinstance(outer := self._import(module, str(statement.module)), Module):
                value = outer.names.get(alias.name, MISSING)
            yield alias.asname or alias.name, value

    def main(self, module: Module) -> None:
        """Follows the statements under `if __name__ == "__main__"`."""
        for statement in ast.parse(read_regular(module.path, _MAX_BYTES).decode(errors="replace")).body:
            if isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("__name__"):
                self.block(module, statement.body)

    def _import(self, module: Module, name: str) -> Any:
        """The module of a dotted name, if its file is below the root or the folder of the importing file."""
        if name == "os":
            get = Builtin("getenv", lambda variable, default=None: self.state.variable(variable, default))
            return Module(Path("os"), {"environ": Environment(), "getenv": get})
        for folder in (self.root, module.path.parent):
            path = folder.joinpath(*name.split(".")).with_suffix(".py")
            if path.is_file():
                try:
                    return self.module(path)
                except (OSError, ValueError, SyntaxError, MemoryError):
                    break
        return Unknown(name, f"ckptkit does not read the module {name}")

    def _class(self, module: Module, node: ast.ClassDef) -> Any:
        fields: dict[str, ast.AnnAssign] = {}
        methods: dict[str, PythonFunction] = {}
        modules: dict[str, Module] = {}
        for base in node.bases:
            parent = self.expressions(module).value(base)
            if isinstance(parent, Unknown):
                return Unknown(node.name, f"its base class {ast.unparse(base)} is unknown")
            if isinstance(parent, Class):
                fields, methods = fields | dict(parent.fields), methods | dict(parent.methods)
                modules |= parent.modules
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    fields[name], modules[name] = statement, module
                case ast.FunctionDef(name=name):
                    methods[name] = PythonFunction(statement, module)
        return Class(node.name, fields, methods, modules)

    def expressions(self, module: Module) -> Expressions:
        return Expressions(self.state, module, self.call)

    def call(self, state: State, function: Any, values: Sequence[Any], named: Mapping[str, Any], node: ast.Call) -> Any:
        """The value of a call. An unknown function may change every object among its arguments."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name in self.watched:
            return self.watched[name](state, values, named, node)
        if isinstance(function, Class):
            return self.create(function, named, values)
        if isinstance(function, PythonFunction):
            end, value = self._run(function, values, named)
            return unknown_expression(node, "it raises an exception") if end == "raise" else value
        for value in (*values, *named.values()):
            if isinstance(value, Object) and name not in _PURE:
                why = f"the call of {name} at line {node.lineno} may change it"
                attributes = state.objects[value.number]
                attributes.update({attribute: Unknown(attribute, why) for attribute in attributes})
        why = f"ckptkit does not follow the call of {unknown_expression(node.func, '').source}"
        return unknown_expression(node, UnfollowedCall(why))

    def create(self, kind: Class, named: Mapping[str, Any], arguments: Sequence[Any] = ()) -> Any:
        """An instance of a dataclass with these fields, and defaults for all other fields."""
        number = len(self.state.objects) + 1 + self.state.steps[0]
        self.state.objects[number] = {}
        values = dict(zip(kind.fields, arguments, strict=False)) | dict(named)
        for name, statement in kind.fields.items():
            if name in values:
                value = values[name]
            elif statement.value is None:
                value = Unknown(name, f"the launch must give {name}")
            else:
                value = self._default(kind.modules[name], statement.value)
            self.state.objects[number][name] = value
        instance = Object(number, kind)
        method = kind.methods.get("__post_init__")
        if method and self._run(replace(method, bound=instance), [], {})[0] == "raise":
            return Unknown(kind.name, "it raises an exception")
        return instance

    def _default(self, module: Module, node: ast.expr) -> Any:
        """The default of a field, also by `field(default=...)` and `field(default_factory=...)`."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "dataclasses.field"):
            parts = {keyword.arg: keyword.value for keyword in node.keywords}
            if "default" not in parts and "default_factory" not in parts:
                return MISSING
            node = parts.get("default") or ast.copy_location(ast.Call(parts["default_factory"], [], []), node)
        return self.expressions(module).value(node)

    def _run(self, function: PythonFunction, arguments: Sequence[Any], named: Mapping[str, Any]) -> End:
        bound = [function.bound] if function.bound else []
        self.state.frames.append(self._locals(function, [*bound, *arguments], named))
        self.returned.append([])
        self.state.step()
        if isinstance(function.node, ast.Lambda):
            ended: End = "return", self.expressions(function.module).value(function.node.body)
        else:
            ended = self._merge_returns(*self.block(function.module, function.node.body))
        self.state.frames.pop()
        self.returned.pop()
        return ended

    def _merge_returns(self, kind: str, value: Any) -> End:
        """The end of a function, with the values of its undecidable returns."""
        returns = list(self.returned[-1])
        if kind != "raise" and not (kind == "return" and value is MISSING):
            returns.insert(0, (self.state.branch(), value, ""))
        if not returns:
            return "raise", None
        state, value, _ = returns[0]
        for other, other_value, why in returns[1:]:
            state, value = merge_states(state, other, why), merge_values(value, other_value, why)
        self.state.take_over(state)
        return "return", value

    def _locals(self, function: PythonFunction, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        signature = function.node.args
        positional = [*signature.posonlyargs, *signature.args]
        names: dict[str, Any] = {one.arg: MISSING for one in (*positional, *signature.kwonlyargs)}
        defaults = [*zip(positional[len(positional) - len(signature.defaults) :], signature.defaults, strict=True)]
        keywords = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
        evaluate = self.expressions(function.module).value
        names |= {parameter.arg: evaluate(value) for parameter, value in (*defaults, *keywords) if value}
        names |= {parameter.arg: value for parameter, value in zip(positional, arguments, strict=False)}
        if signature.vararg:
            names[signature.vararg.arg] = tuple(arguments[len(positional) :])
        if signature.kwarg:
            names[signature.kwarg.arg] = {name: value for name, value in named.items() if name not in names}
        return names | {name: value for name, value in named.items() if name in names}

    def block(self, module: Module, body: Sequence[ast.stmt]) -> End:
        """Follows statements in order, and both ways of an unknown condition."""
        for statement in body:
            self.state.step()
            match statement:
                case ast.If(test=test, body=then, orelse=orelse):
                    truth = truth_of(self.expressions(module).value(test))
                    ways = [then, orelse] if truth is None else [then if truth else orelse]
                    why = f"it depends on `{unknown_expression(test, '').source}` at {module.path.name}:{test.lineno}"
                    ended = self._ways(module, ways, why)
                case ast.Match():
                    ended = self._match(module, statement)
                case ast.Try(body=then, finalbody=last):
                    ended = self.block(module, [*then, *last])
                case ast.With(body=then, items=items):
                    for item in items:
                        self.expressions(module).value(item.context_expr)
                    ended = self.block(module, then)
                case ast.For():
                    ended = self._loop(module, statement)
                case _:
                    ended = self._statement(module, statement)
            if ended[0]:
                return ended
        return "", None

    def _ways(self, module: Module, ways: Sequence[Sequence[ast.stmt]], why: str) -> End:
        """Follows blocks of which one runs, but it is not known which. Blocks that raise have no part in the result."""
        if len(ways) == 1:
            return self.block(module, ways[0])
        outer = self.state
        going: list[State] = []
        kinds: set[str] = set()
        for way in ways:
            self.state = outer.branch()
            kind, value = self.block(module, way)
            kinds.add(kind)
            if kind == "return":
                self.returned[-1].append((self.state, value, why))
            elif kind != "raise":
                going.append(self.state)
        self.state = outer
        if not going:
            return ("return", MISSING) if "return" in kinds else ("raise", None)
        state = going[0]
        for other in going[1:]:
            state = merge_states(state, other, why)
        outer.take_over(state)
        kinds -= {"return", "raise"}
        return (kinds.pop() if len(kinds) == 1 else "unsure"), None  # type: ignore[return-value]

    def _match(self, module: Module, statement: ast.Match) -> End:
        subject = self.expressions(module).value(statement.subject)
        ways: list[Sequence[ast.stmt]] = []
        for case in statement.cases:
            matches = self._matches(module, subject, case.pattern) if case.guard is None else None
            if matches is not False:
                ways.append(case.body)
            if matches:
                break
        if len(ways) != 1:
            ways.append([])
        source = unknown_expression(statement.subject, "").source
        return self._ways(module, ways, f"it depends on `{source}` at {module.path.name}:{statement.lineno}")

    def _matches(self, module: Module, subject: Any, pattern: ast.pattern) -> bool | None:
        match pattern:
            case ast.MatchAs(pattern=None, name=None):
                return True
            case ast.MatchValue(value=value):
                expected = self.expressions(module).value(value)
                is_unknown = isinstance(subject, Unknown | Text) or isinstance(expected, Unknown | Text)
                return None if is_unknown else bool(subject == expected)
            case ast.MatchSingleton(value=value):
                return None if isinstance(subject, Unknown) else subject is value
            case ast.MatchOr(patterns=patterns):
                results = [self._matches(module, subject, inner) for inner in patterns]
                return True if True in results else None if None in results else False
            case ast.MatchSequence(patterns=patterns) if isinstance(subject, list | tuple):
                results = [self._matches(module, *pair) for pair in zip(subject, patterns, strict=False)]
                if len(subject) != len(patterns) or False in results:
                    return False
                return None if None in results else True
        return None

    def _loop(self, module: Module, statement: ast.For) -> End:
        items = self.expressions(module).value(statement.iter)
        if not isinstance(items, list | tuple | dict) or statement.orelse:
            self._forget(module, statement, f"ckptkit does not follow the loop at line {statement.lineno}")
            return "", None
        for item in list(items):
            self.expressions(module).bind(statement.target, item)
            kind, value = self.block(module, statement.body)
            if kind in ("return", "raise"):
                return kind, value
            if kind == "unsure":
                self._forget(module, statement, f"a loop at line {statement.lineno} that may end early")
            if kind in ("break", "unsure"):
                break
        return "", None

    def _statement(self, module: Module, statement: ast.stmt) -> End:
        expressions = self.expressions(module)
        match statement:
            case ast.Assign(targets=targets, value=value):
                result = expressions.value(value)
                for target in targets:
                    expressions.bind(target, result)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                expressions.bind(target, expressions.value(value))
            case ast.AugAssign(target=target, op=symbol, value=value):
                operand = ast.parse(ast.unparse(target), mode="eval").body
                operation = ast.copy_location(ast.BinOp(operand, symbol, value), statement)
                expressions.bind(target, expressions.value(ast.fix_missing_locations(operation)))
            case ast.Import() | ast.ImportFrom():
                self.state.frames[-1].update(self._imports(module, statement))
            case ast.Return(value=value):
                return "return", None if value is None else expressions.value(value)
            case ast.Raise():
                return "raise", None
            case ast.Break():
                return "break", None
            case ast.Continue():
                return "continue", None
            case ast.Expr(value=value):
                self._expression(module, value)
            case ast.FunctionDef(name=name) if self.state.frames[-1] is not module.names:
                self.state.frames[-1][name] = PythonFunction(statement, module)
            case _ if not isinstance(statement, _IGNORED):
                self._forget(module, statement, f"ckptkit does not follow the statement at line {statement.lineno}")
        return "", None

    def _expression(self, module: Module, value: ast.expr) -> None:
        """Follows a call that may change a list, a dictionary, or the environment."""
        expressions = self.expressions(module)
        match value:
            case ast.Call(ast.Attribute(owner, method)) if isinstance(expressions.value(owner), Environment):
                self._change_environment(method, [expressions.value(argument) for argument in value.args], value.lineno)
            case ast.Call(ast.Attribute(ast.Name(name) as owner, "append" | "extend" | "update" as method), [argument]):
                before, added = expressions.value(owner), expressions.value(argument)
                after: Any = Unknown(name, f"{method} at line {value.lineno}")
                if isinstance(before, list) and method == "append":
                    after = [*before, added]
                elif isinstance(before, list) and isinstance(added, list | tuple):
                    after = [*before, *added]
                elif isinstance(before, dict) and isinstance(added, dict):
                    after = before | added
                expressions.bind(owner, after)
            case _:
                expressions.value(value)

    def _change_environment(self, method: str, arguments: Sequence[Any], line: int) -> None:
        variables = self.state.objects[ENVIRONMENT]
        why = f"the environment is changed at line {line}"
        first = arguments[0] if arguments else None
        if method == "update" and isinstance(first, dict) and is_known(first):
            variables.update(first)
        elif method != "get":
            names = [first] if isinstance(first, str) else list(variables)
            variables.update({name: Unknown(name, why) for name in names})

    def _forget(self, module: Module, statement: ast.stmt, why: str) -> None:
        expressions = self.expressions(module)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                expressions.bind(node, Unknown(ast.unparse(node), why))
