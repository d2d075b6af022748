"""Follows a script's commands: assignments, conditions, loops and functions. Starts no process and writes no file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.storage.regular import read_regular
from verify.launch.shell.arithmetic import ArithmeticFault
from verify.launch.shell.assign import assign
from verify.launch.shell.commands import Result, known_command
from verify.launch.shell.conditions import decide, opposite
from verify.launch.shell.expand import calculate_in, expand, joined, script_directory, unknown
from verify.launch.shell.parser import nested, parse
from verify.launch.shell.syntax import (
    AndOr,
    Calculation,
    Case,
    For,
    ForArithmetic,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Simple,
    Substitution,
    Test,
    While,
)
from verify.launch.shell.trainers import inner_script, start_of
from verify.launch.shell.values import DEEPEST, Shell, TooMuchError, Value, merged, together

# How a list of commands ended. "maybe": it may have ended early, and nobody knows.
Flow = Literal["", "exit", "return", "break", "continue", "maybe"]
Body = Callable[[Shell], Flow]
_LARGEST_FILE = 300_000
_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_LOCAL = frozenset({"local", "declare", "typeset"})
_QUIET = frozenset({"activate", ".bashrc", ".bash_profile", ".profile"})


def follow(shell: Shell, nodes: Sequence[Node]) -> tuple[Flow, Result]:
    """Follows commands one after the other. Returns how they ended, and whether the last one succeeded."""
    result: Result = True
    for number, node in enumerate(nodes):
        flow, result = _node(shell, node)
        if flow == "maybe":
            _either(shell, [_body(nodes[number + 1 :]), _nothing], shell.place(node.line))
            return "maybe", None
        if flow:
            return flow, result
    return "", result


def _nothing(_: Shell) -> Flow:
    return ""


def _node(shell: Shell, node: Node) -> tuple[Flow, Result]:
    shell.step()
    match node:
        case Simple():
            return _simple(shell, node)
        case AndOr():
            return _and_or(shell, node)
        case Pipeline():
            return _pipeline(shell, node)
        case If():
            return _if(shell, node, 0)
        case Case():
            return _case(shell, node)
        case For() | ForArithmetic() | While():
            return _loop(shell, node), None
        case Group(body, subshell):
            return _subshell(shell, body) if subshell else follow(shell, body)
        case Function(name, body):
            shell.functions[name] = body
            return "", True
        case Calculation(text):
            return "", _calculated(shell, text)
        case Test(words):
            return "", decide([joined(shell, word, substituted) for word in words], patterns=True)


def _calculated(shell: Shell, text: str) -> Result:
    try:
        return calculate_in(shell, text, substituted) != 0
    except ArithmeticFault as fault:
        for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", text):
            shell.forget(name, str(fault))
        return None


def _subshell(shell: Shell, body: Sequence[Node]) -> tuple[Flow, Result]:
    """Commands whose variables are gone afterwards."""
    return "", follow(shell.branch(), body)[1]


def _either(shell: Shell, bodies: Sequence[Body], where: str, what: str = "a condition") -> Flow:
    """One of these bodies is run, and nobody knows which. Those that end the script are not what comes after it."""
    why = f"it depends on {what} at {where} that cannot be decided"
    before = len(shell.output or ())
    ended: list[tuple[Shell, Flow]] = []
    for body in bodies:
        branch = shell.branch()
        ended.append((branch, body(branch)))
        shell.arguments_used |= branch.arguments_used
    if shell.output is not None and len(shell.output) > before:
        shell.output.append(unknown("$(...)", why))
    left = [(branch, flow) for branch, flow in ended if flow != "exit"]
    if not left:
        return "exit"
    state = left[0][0]
    for other, _ in left[1:]:
        state.variables = merged(state, other, why)
        state.functions = other.functions | state.functions
        state.directory = state.directory if state.directory == other.directory else None
    shell.take_over(state)
    flows = {flow for _, flow in left}
    return flows.pop() if len(flows) == 1 else "maybe"


def _and_or(shell: Shell, node: AndOr) -> tuple[Flow, Result]:
    flow, result = _node(shell, node.parts[0])
    for operator, part in zip(node.operators, node.parts[1:], strict=True):
        if flow:
            return flow, result
        wanted = result if operator == "&&" else opposite(result)
        if wanted is None:
            flow, result = _either(shell, [_body([part]), _nothing], shell.place(part.line)), None
        elif wanted:
            flow, result = _node(shell, part)
    return flow, result


def _body(nodes: Sequence[Node]) -> Body:
    return lambda shell: follow(shell, nodes)[0]


def _pipeline(shell: Shell, node: Pipeline) -> tuple[Flow, Result]:
    if len(node.commands) == 1:
        flow, result = _node(shell, node.commands[0])
        return flow, opposite(result) if node.negated else result
    for command in node.commands:
        branch = shell.branch()
        branch.output = None
        _node(branch, command)
    if shell.output is not None:
        shell.output.append(unknown("$(... | ...)", "the output of other commands"))
    return "", None


def _if(shell: Shell, node: If, number: int) -> tuple[Flow, Result]:
    """The branches from `number` on."""
    if number == len(node.branches):
        return "", True
    conditions, body = node.branches[number]
    flow, result = follow(shell, conditions) if conditions else ("", True)
    if flow:
        return flow, result
    if result is None:
        other: Body = lambda one: _if(one, node, number + 1)[0]  # noqa: E731 - it must remember the number
        return _either(shell, [_body(body), other], shell.place(node.line)), None
    return follow(shell, body) if result else _if(shell, node, number + 1)


def _case(shell: Shell, node: Case) -> tuple[Flow, Result]:
    subject = joined(shell, node.subject, substituted)
    for patterns, body in node.branches:
        values = [joined(shell, pattern, substituted) for pattern in patterns]
        if not subject.known or not all(value.known for value in values):
            bodies = [_body(body) for _, body in node.branches]
            return _either(shell, [*bodies, _nothing], shell.place(node.line)), None
        if any(fnmatchcase(subject.text, value.text) for value in values):
            return follow(shell, body)
    return "", True


def _loop(shell: Shell, node: For | ForArithmetic | While) -> Flow:
    flow = _for(shell, node) if isinstance(node, For) else _while(shell, node)
    return flow if flow in ("exit", "return", "maybe") else ""


def _for(shell: Shell, node: For) -> Flow:
    values = list(shell.arguments) if node.words is None else expand(shell, node.words, substituted)
    for value in values:
        if not value.known:
            shell.forget(node.name, f"one of the words of a loop at {shell.place(node.line)}")
            return _once(shell, node)
        shell.assign(node.name, value)
        flow = follow(shell, node.body)[0]
        if flow == "maybe":
            return _once(shell, node)
        if flow in ("exit", "return"):
            return flow
        if flow == "break":
            break
    return ""


def _once(shell: Shell, node: For | ForArithmetic | While) -> Flow:
    """A loop of which nobody knows how often its body runs."""
    flow = _either(shell, [_body(node.body), _nothing], shell.place(node.line), "a loop")
    return "" if flow in ("break", "continue", "maybe") else flow


def _while(shell: Shell, node: ForArithmetic | While) -> Flow:
    if isinstance(node, ForArithmetic):
        _calculated(shell, node.start)
    while True:
        shell.step()
        holds = _holds(shell, node)
        if holds is None:
            return _once(shell, node)
        if not holds:
            return ""
        flow = follow(shell, node.body)[0]
        if flow == "maybe":
            return _once(shell, node)
        if flow in ("exit", "return"):
            return flow
        if flow == "break":
            return ""
        if isinstance(node, ForArithmetic):
            _calculated(shell, node.step)


def _holds(shell: Shell, node: ForArithmetic | While) -> Result:
    if isinstance(node, ForArithmetic):
        return _calculated(shell, node.condition or "1")
    result = follow(shell, node.condition)[1]
    return opposite(result) if node.until else result


def substituted(shell: Shell, part: Substitution) -> Value:
    """The output of the commands in `$(...)`, where it is known."""
    branch = shell.branch()
    branch.output, branch.depth = [], shell.depth + 1
    _deep(branch)
    branch.step(len(part.source))
    try:
        nodes = nested(part, str(shell.file or "the command line"))
    except CkptkitError as error:
        return unknown(part.source, error.message)
    follow(branch, nodes)
    shell.arguments_used |= branch.arguments_used
    if any(not value.known for value in branch.output):
        why = next(gap.why for value in branch.output for gap in value.gaps)
        return unknown(part.source, why)
    return Value(together(value.text for value in branch.output).rstrip("\n"))


def _deep(shell: Shell) -> None:
    if shell.depth > DEEPEST:
        raise TooMuchError(f"more than {DEEPEST} functions, files and commands stand inside one another")


def _simple(shell: Shell, node: Simple) -> tuple[Flow, Result]:
    words = expand(shell, node.words, substituted)
    if not words or words[0].text in _DECLARES:
        if words and shell.locals and words[0].text in _LOCAL:
            shell.locals[-1] |= {
                word.text: shell.variables.get(word.text) for word in words[1:] if word.text not in shell.locals[-1]
            }
        known = [assign(shell, assignment, substituted) for assignment in node.assignments]
        if not words:
            return "", True if all(known) else None
    elif node.assignments:
        return _with_assignments(shell, node, words)
    return _command(shell, node, words, {})


def _with_assignments(shell: Shell, node: Simple, words: list[Value]) -> tuple[Flow, Result]:
    """`NAME=value command`: only the command sees them."""
    branch = shell.branch()
    for assignment in node.assignments:
        assign(branch, assignment, substituted)
    given = {one.name: branch.variables[one.name] for one in node.assignments}
    before = {name: shell.variables.get(name) for name in given}
    shell.variables |= given
    outcome = _command(shell, node, words, {name: one.values[0] for name, one in given.items() if one.values})
    for name, variable in before.items():
        shell.restore(name, variable)
    return outcome


def _command(shell: Shell, node: Simple, words: list[Value], given: dict[str, Value]) -> tuple[Flow, Result]:
    """One command with its words; `given` are the variables that only it sees."""
    name = words[0].text
    if name in ("exit", "return", "break", "continue"):
        if name == "exit":
            shell.stopped.append(shell.place(node.line))
        return name, True  # type: ignore[return-value]
    if name in shell.functions:
        return _call(shell, shell.functions[name], words)
    if name in ("source", ".") and words[1:]:
        return _source(shell, words, node.line)
    if name == "eval":
        return _eval(shell, words[1:], node.line)
    if name in ("[", "test"):
        return "", decide(words[1:-1] if name == "[" else words[1:], patterns=False)
    if name.startswith("-"):
        shell.lost.append((tuple(words), node.line, shell.file))
        return "", None
    if start := start_of(words, shell, given, node.line):
        shell.starts.append(start)
        return "", None
    if (text := inner_script(words)) is not None:
        return _inner(shell, text, node.line)
    here = joined(shell, node.here, substituted) if node.here else None
    known, result = known_command(shell, words, here, node.line)
    if not known and shell.output is not None:
        shell.output.append(unknown(f"$({name})", f"the output of `{name}` at {shell.place(node.line)}"))
    return "", result


def _call(shell: Shell, body: Node, words: list[Value]) -> tuple[Flow, Result]:
    """A function, with its words as positional parameters."""
    before, used = shell.arguments, shell.arguments_used
    shell.arguments, shell.depth = tuple(words[1:]), shell.depth + 1
    _deep(shell)
    shell.locals.append({})
    flow, result = _node(shell, body)
    for name, variable in shell.locals.pop().items():
        shell.restore(name, variable)
    shell.arguments, shell.depth, shell.arguments_used = before, shell.depth - 1, used
    return ("exit" if flow == "exit" else ""), result


def _source(shell: Shell, words: list[Value], line: int) -> tuple[Flow, Result]:
    """`source FILE`, whose variables stay."""
    said = words[1].text
    path = script_directory(shell, said) if words[1].known else None
    if Path(said).name in _QUIET:
        return "", None
    if path is None:
        why = f": {words[1].gaps[0]}" if words[1].gaps else ", a path that is not known"
        shell.unresolved[f"{shell.place(line)}: source {said}{why}"] = None
        return "", None
    try:
        text = read_regular(path, _LARGEST_FILE).decode(errors="replace")
    except FileNotFoundError:
        shell.unresolved[f"{shell.place(line)}: source {said}: there is no such file"] = None
        return "", None
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        why = str((error.strerror if isinstance(error, OSError) else None) or error)
        shell.unresolved[f"{shell.place(line)}: source {shortened(said)}: {why}"] = None
        return "", None
    try:
        shell.step(len(text))
        nodes = parse(text, str(path))
    except CkptkitError as error:
        shell.unresolved[f"{shell.place(line)}: source {said}: {error.message}"] = None
        return "", None
    before, shell.file, shell.depth = shell.file, path, shell.depth + 1
    _deep(shell)
    flow, result = follow(shell, nodes)
    shell.file, shell.depth = before, shell.depth - 1
    return ("exit" if flow == "exit" else ""), result


def _eval(shell: Shell, words: Sequence[Value], line: int) -> tuple[Flow, Result]:
    if all(word.known for word in words):
        return _inner(shell, together((word.text for word in words), " "), line)
    shell.unresolved[f"{shell.place(line)}: eval of a text that is not known"] = None
    return "", None


def _inner(shell: Shell, text: str, line: int) -> tuple[Flow, Result]:
    """A script inside a script, as `bash -c` has it."""
    shell.depth += 1
    _deep(shell)
    shell.step(len(text))
    try:
        flow, result = follow(shell, parse(text, str(shell.file or "the command line"), line))
    except CkptkitError:
        shell.unresolved[f"{shell.place(line)}: a text that is run as a script, and is none"] = None
        flow, result = "", None
    shell.depth -= 1
    return flow, result
