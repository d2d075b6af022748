"""Follows the statements of a Python file: assignments, conditions, loops over data, functions and dataclasses."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

# How statements ended: on, with a value that is returned, or by an exception.
# "unsure": a round of a loop may have been left early. A value of `MISSING` stands among those of `returned`.
Ended = tuple[Literal["", "return", "raise", "break", "continue", "unsure"], Any]
_MAX_BYTES = 300_000
# They change nothing that they are given.
_HARMLESS = frozenset(
    {"partial", "Path", "isinstance", "hasattr", "getattr", "asdict", "replace", "repr", "type", "print"}
)
_SIMPLE = (ast.Pass, ast.Assert, ast.Global, ast.Nonlocal, ast.ClassDef, ast.FunctionDef)


@dataclass
class Follower:
    """Follows files below `root`. `watched` are calls that are told and not followed, by the function's name."""

    root: Path
    environment: Mapping[str, Any]
    watched: Mapping[str, Callable[[State, Sequence[Any], Mapping[str, Any], ast.Call], Any]]
    modules: dict[Path, Module] = field(default_factory=dict)
    state: State = field(default_factory=State)
    # For every function that is followed, what it may have returned in a way that nobody can decide.
    returned: list[list[tuple[State, Any, str]]] = field(default_factory=lambda: [[]])

    def __post_init__(self) -> None:
        self.state.objects[ENVIRONMENT] = {
            name: Unknown(f"${name}", HIDDEN) if isinstance(value, str) and is_secret(name, value) else value
            for name, value in self.environment.items()
        }

    def module(self, path: Path) -> Module:
        """The names of a file. Raises OSError and SyntaxError where it cannot be read."""
        path = path.resolve()
        if path in self.modules:
            return self.modules[path]
        module = self.modules[path] = Module(path)
        module.names["__file__"] = str(path)
        module.names["__name__"] = "__main__" if len(self.modules) == 1 else path.stem
        text = read_regular(path, _MAX_BYTES).decode(errors="replace")
        self.state.step(len(text) // 100)
        for statement in ast.parse(text).body:
            self._of_module(module, statement)
        return module

    def _of_module(self, module: Module, statement: ast.stmt) -> None:
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
        """The names that an import sets."""
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                name = alias.asname or alias.name.partition(".")[0]
                yield name, self._imported(module, alias.name if alias.asname else name)
                continue
            inner = self._imported(module, f"{statement.module}.{alias.name}")
            outer = self._imported(module, str(statement.module)) if isinstance(inner, Unknown) else None
            yield (
                alias.asname or alias.name,
                outer.names.get(alias.name, MISSING) if isinstance(outer, Module) else inner,
            )

    def main(self, module: Module) -> None:
        """What a file does where it is started itself."""
        text = read_regular(module.path, _MAX_BYTES).decode(errors="replace")
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("__name__"):
                self.block(module, statement.body)

    def _imported(self, module: Module, name: str) -> Any:
        """The module of a dotted name, where its file lies below the root or beside the file that imports it."""
        if name == "os":
            environment = Environment()
            get = Builtin("getenv", lambda one, default=None: self.state.variable(one, default))
            return Module(Path("os"), {"environ": environment, "getenv": get})
        parts = name.split(".")
        for folder in (self.root, module.path.parent):
            path = folder.joinpath(*parts).with_suffix(".py")
            if path.is_file():
                try:
                    return self.module(path)
                except (OSError, ValueError, SyntaxError, MemoryError):
                    break
        return Unknown(name, f"the module {name} is not followed")

    def _class(self, module: Module, node: ast.ClassDef) -> Any:
        fields: dict[str, ast.AnnAssign] = {}
        methods: dict[str, PythonFunction] = {}
        modules: dict[str, Module] = {}
        for base in node.bases:
            parent = self.expressions(module).value(base)
            if isinstance(parent, Unknown):
                return Unknown(node.name, f"its base {ast.unparse(base)} is not known")
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
        """Works out expressions of a module."""
        return Expressions(self.state, module, self.call)

    def call(
        self,
        state: State,
        module: Module,
        function: Any,
        arguments: Sequence[Any],
        named: Mapping[str, Any],
        node: ast.Call,
    ) -> Any:
        """What a call gives. A function that is not known may have changed every object that it was given."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name in self.watched:
            return self.watched[name](state, arguments, named, node)
        if isinstance(function, Class):
            return self.create(function, named, arguments)
        if isinstance(function, PythonFunction):
            ended, value = self._run(function, arguments, named)
            return unknown_expression(node, "it raises an exception") if ended == "raise" else value
        for value in (*arguments, *named.values()):
            if isinstance(value, Object) and name not in _HARMLESS:
                why = f"the call of {name} at line {node.lineno} may change it"
                attributes = state.objects[value.number]
                attributes.update({one: Unknown(one, why) for one in attributes})
        return unknown_expression(node, f"the call of {unknown_expression(node.func, '').source} is not followed")

    def create(self, kind: Class, given: Mapping[str, Any], arguments: Sequence[Any] = ()) -> Any:
        """An instance of a dataclass: what is given counts before the defaults of its fields."""
        number = len(self.state.objects) + 1 + self.state.steps[0]
        self.state.objects[number] = {}
        named = dict(zip(kind.fields, arguments, strict=False)) | dict(given)
        for name, statement in kind.fields.items():
            if name in named:
                value = named[name]
            elif statement.value is None:
                value = Unknown(name, f"the launch must give {name}")
            else:
                value = self._default(kind.modules[name], statement.value)
            self.state.objects[number][name] = value
        made = Object(number, kind)
        if after := kind.methods.get("__post_init__"):
            ended, _ = self._run(PythonFunction(after.node, after.module, made), [], {})
            if ended == "raise":
                return Unknown(kind.name, "it raises an exception")
        return made

    def _default(self, module: Module, node: ast.expr) -> Any:
        """The default of a field, also by `field(default=...)` and `field(default_factory=...)`."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "dataclasses.field"):
            parts = {keyword.arg: keyword.value for keyword in node.keywords}
            if "default" in parts:
                return self.expressions(module).value(parts["default"])
            made = ast.copy_location(ast.Call(parts.get("default_factory", node), [], []), node)
            return self.expressions(module).value(made) if "default_factory" in parts else MISSING
        return self.expressions(module).value(node)

    def _run(self, function: PythonFunction, arguments: Sequence[Any], named: Mapping[str, Any]) -> Ended:
        bound = [function.bound] if function.bound else []
        names = self._parameters(function, [*bound, *arguments], named)
        self.state.frames.append(names)
        self.returned.append([])
        self.state.step()
        if isinstance(function.node, ast.Lambda):
            ended: Ended = "return", self.expressions(function.module).value(function.node.body)
        else:
            ended = self._ended(self.block(function.module, function.node.body))
        self.state.frames.pop()
        self.returned.pop()
        return ended

    def _ended(self, ended: Ended) -> Ended:
        """How a function ended, with the values that it may have returned before."""
        kind, value = ended
        known = [] if kind == "raise" or (kind == "return" and value is MISSING) else [(self.state.branch(), value, "")]
        every = [*known, *self.returned[-1]]
        if not every:
            return "raise", None
        state, value, _ = every[0]
        for other, more, why in every[1:]:
            state, value = merge_states(state, other, why), merge_values(value, more, why)
        self.state.take_over(state)
        return "return", value

    def _parameters(
        self, function: PythonFunction, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> dict[str, Any]:
        stated = function.node.args
        positional = [*stated.posonlyargs, *stated.args]
        names: dict[str, Any] = {one.arg: MISSING for one in (*positional, *stated.kwonlyargs)}
        count = len(stated.defaults)
        defaults = [*zip(positional[len(positional) - count :], stated.defaults, strict=True)]
        defaults += [(one, value) for one, value in zip(stated.kwonlyargs, stated.kw_defaults, strict=True) if value]
        names |= {one.arg: self.expressions(function.module).value(value) for one, value in defaults}
        names |= {one.arg: value for one, value in zip(positional, arguments, strict=False)}
        if stated.vararg:
            names[stated.vararg.arg] = tuple(arguments[len(positional) :])
        rest = {name: value for name, value in named.items() if name not in names}
        if stated.kwarg:
            names[stated.kwarg.arg] = rest
        return names | {name: value for name, value in named.items() if name in names}

    def block(self, module: Module, body: Sequence[ast.stmt]) -> Ended:
        """Statements one after the other; where a condition is not known, both ways are followed."""
        for statement in body:
            self.state.step()
            match statement:
                case ast.If(test=test, body=then, orelse=other):
                    truth = truth_of(self.expressions(module).value(test))
                    ways = [[*then], [*other]] if truth is None else [[*(then if truth else other)]]
                    why = f"it depends on `{unknown_expression(test, '').source}` at {module.path.name}:{test.lineno}"
                case ast.Match():
                    ways, why = self._cases(module, statement)
                case ast.Try(body=then, finalbody=last):
                    ways, why = [[*then, *last]], ""
                case ast.With(body=then, items=items):
                    for item in items:
                        self.expressions(module).value(item.context_expr)
                    ways, why = [[*then]], ""
                case ast.For():
                    ended = self._loop(module, statement)
                    if ended[0]:
                        return ended
                    continue
                case _:
                    ended = self._statement(module, statement)
                    if ended[0]:
                        return ended
                    continue
            ended = self.block(module, ways[0]) if len(ways) == 1 else self._ways(module, ways, why)
            if ended[0]:
                return ended
        return "", None

    def _ways(self, module: Module, ways: Sequence[Sequence[ast.stmt]], why: str) -> Ended:
        """One of these is run, and nobody knows which. Those that raise are not what comes after it."""
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

    def _cases(self, module: Module, statement: ast.Match) -> tuple[list[list[ast.stmt]], str]:
        subject = self.expressions(module).value(statement.subject)
        source = unknown_expression(statement.subject, "").source
        why = f"it depends on `{source}` at {module.path.name}:{statement.lineno}"
        ways: list[list[ast.stmt]] = []
        for case in statement.cases:
            found = self._matches(module, subject, case.pattern) if case.guard is None else None
            if found is not False:
                ways.append([*case.body])
            if found:
                break
        return (ways if len(ways) == 1 else [*ways, []]) if ways else [[]], why

    def _matches(self, module: Module, subject: Any, pattern: ast.pattern) -> bool | None:
        match pattern:
            case ast.MatchAs(pattern=None, name=None):
                return True
            case ast.MatchValue(value=value):
                wanted = self.expressions(module).value(value)
                unknown_ = isinstance(subject, Unknown | Text) or isinstance(wanted, Unknown | Text)
                return None if unknown_ else bool(subject == wanted)
            case ast.MatchSingleton(value=value):
                return None if isinstance(subject, Unknown) else subject is value
            case ast.MatchOr(patterns=patterns):
                found = [self._matches(module, subject, one) for one in patterns]
                return True if True in found else None if None in found else False
            case ast.MatchSequence(patterns=patterns) if isinstance(subject, list | tuple):
                pairs = zip(subject, patterns, strict=False)
                found = [self._matches(module, one, other) for one, other in pairs]
                if len(subject) != len(patterns) or False in found:
                    return False
                return None if None in found else True
        return None

    def _loop(self, module: Module, statement: ast.For) -> Ended:
        expressions = self.expressions(module)
        many = expressions.value(statement.iter)
        if not isinstance(many, list | tuple | dict) or statement.orelse:
            self._forget(module, [statement], f"a loop at line {statement.lineno} that is not followed")
            return "", None
        for item in list(many):
            self.expressions(module).bind(statement.target, item)
            kind, value = self.block(module, statement.body)
            if kind in ("return", "raise"):
                return kind, value
            if kind == "unsure":
                self._forget(module, [statement], f"a loop at line {statement.lineno} that may end early")
            if kind in ("break", "unsure"):
                break
        return "", None

    def _statement(self, module: Module, statement: ast.stmt) -> Ended:
        expressions = self.expressions(module)
        match statement:
            case ast.Assign(targets=targets, value=value):
                known = expressions.value(value)
                for target in targets:
                    expressions.bind(target, known)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                expressions.bind(target, expressions.value(value))
            case ast.AugAssign(target=target, op=symbol, value=value):
                read = ast.parse(ast.unparse(target), mode="eval").body
                whole = ast.copy_location(ast.BinOp(read, symbol, value), statement)
                expressions.bind(target, expressions.value(ast.fix_missing_locations(whole)))
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
            case _ if not isinstance(statement, _SIMPLE):
                self._forget(module, [statement], f"a statement at line {statement.lineno} that is not followed")
        return "", None

    def _expression(self, module: Module, value: ast.expr) -> None:
        """An expression by itself: a call that may change a list, a dictionary of a name, or the environment."""
        expressions = self.expressions(module)
        match value:
            case ast.Call(func=ast.Attribute(value=owner, attr=how)) if isinstance(
                expressions.value(owner), Environment
            ):
                self._environment(how, [expressions.value(one) for one in value.args], value.lineno)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name) as owner, attr=how), args=[argument]) if how in (
                "append",
                "extend",
                "update",
            ):
                before, known = expressions.value(owner), expressions.value(argument)
                if isinstance(before, list) and (how == "append" or isinstance(known, list | tuple)):
                    expressions.bind(owner, [*before, known] if how == "append" else [*before, *known])
                elif isinstance(before, dict) and isinstance(known, dict):
                    expressions.bind(owner, before | known)
                else:
                    expressions.bind(owner, Unknown(name, f"{how} at line {value.lineno}"))
            case _:
                expressions.value(value)

    def _environment(self, how: str, arguments: Sequence[Any], line: int) -> None:
        """`os.environ.update(...)` and its like."""
        variables = self.state.objects[ENVIRONMENT]
        why = f"the environment is changed at line {line}"
        first = arguments[0] if arguments else None
        if how == "update" and isinstance(first, dict) and is_known(first):
            variables.update(first)
        elif isinstance(first, str) and how != "get":
            variables[first] = Unknown(first, why)
        elif how != "get":
            variables.update({name: Unknown(name, why) for name in variables})

    def _forget(self, module: Module, body: Sequence[ast.AST], why: str) -> None:
        """Makes every name and attribute unknown that these statements may set."""
        expressions = self.expressions(module)
        for target in _targets(body):
            expressions.bind(target, Unknown(ast.unparse(target), why))


def _targets(body: Sequence[ast.AST]) -> Iterator[ast.expr]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node
