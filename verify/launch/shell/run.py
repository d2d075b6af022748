"""Follows a script's commands: assignments, conditions, loops and functions. Starts no process and writes no file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from verify.launch.shell.arithmetic import ArithmeticFault
from verify.launch.shell.commands import Result, filtered, known_command
from verify.launch.shell.conditions import decide, opposite
from verify.launch.shell.expand import Run, as_pattern, calculate_in, expand, joined, unknown
from verify.launch.shell.flow import (
    Flow,
    Runner,
    and_or,
    body_of,
    calculated,
    case_command,
    either,
    guarded,
    if_command,
    loop,
    nothing,
)
from verify.launch.shell.parser import nested
from verify.launch.shell.scripts import deeper, evaluate, exported, inner, source, started
from verify.launch.shell.syntax import (
    AndOr,
    Assignment,
    Calculation,
    Case,
    For,
    ForArithmetic,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Redirected,
    ShellWord,
    Simple,
    Substitution,
    Test,
    While,
)
from verify.launch.shell.trainers import inner_script, start_of
from verify.launch.shell.values import Gap, Shell, Value, Variable, together

_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_LOCAL = frozenset({"local", "declare", "typeset"})
_INDEXED = re.compile(r"\[[^]]*\]\+?=")


def follow(shell: Shell, nodes: Sequence[Node]) -> tuple[Flow, Result]:
    """Follows commands one after the other. Returns how they ended, and whether the last one succeeded."""
    result: Result = True
    for number, node in enumerate(nodes):
        flow, result = _node(shell, node)
        if flow == "maybe":
            either(shell, [body_of(_RUN, nodes[number + 1 :]), nothing], shell.place(node.line))
            return "maybe", None
        if flow:
            return flow, result
    return "", result


def _node(shell: Shell, node: Node) -> tuple[Flow, Result]:
    """One command. Under `set -e` one that fails ends the script, unless a condition asks for its result."""
    flow, shell.result = _done(shell, node)
    alone = isinstance(node, Simple | Calculation | Test) or (isinstance(node, Group) and node.subshell)
    alone = alone or (isinstance(node, Pipeline) and not node.negated)
    if flow or shell.result is not False or shell.guarded or not alone or shell.errexit is False:
        return flow, shell.result
    if shell.errexit is None:
        return "maybe", None
    shell.stopped.append(shell.place(node.line))
    return "exit", False


def _done(shell: Shell, node: Node) -> tuple[Flow, Result]:
    shell.step()
    match node:
        case Simple():
            return _simple(shell, node)
        case AndOr():
            return and_or(_RUN, shell, node)
        case Pipeline():
            return _pipeline(shell, node)
        case If():
            return if_command(_RUN, shell, node, 0)
        case Case():
            return case_command(_RUN, shell, node)
        case For() | ForArithmetic():
            shell.result = True
            return loop(_RUN, shell, node), shell.result
        case While():
            flow = loop(_RUN, shell, node)
            return flow, shell.result if flow in ("exit", "return") else None
        case Group(body, subshell):
            return _subshell(shell, body) if subshell else follow(shell, body)
        case Redirected(inner):
            return _silent(shell, lambda: _node(shell, inner))
        case Function(name, body):
            shell.functions[name] = body
            return "", True
        case Calculation(text):
            return "", calculated(_RUN, shell, text)
        case Test(words):
            return "", decide(_compared(shell, words), patterns=True)


def _compared(shell: Shell, words: Sequence[ShellWord]) -> list[Value]:
    """The words of `[[ ]]`, of which those behind `==` are patterns."""
    before = ["", *(word.plain for word in words)]
    return [
        as_pattern(shell, word, substituted) if operator in ("=", "==", "!=") else joined(shell, word, substituted)
        for word, operator in zip(words, before, strict=False)
    ]


def _silent(shell: Shell, act: Callable[[], tuple[Flow, Result]]) -> tuple[Flow, Result]:
    """What is done by commands whose output goes to a file."""
    output, shell.output = shell.output, None
    outcome = act()
    shell.output = output
    return outcome


def _subshell(shell: Shell, body: Sequence[Node]) -> tuple[Flow, Result]:
    """Commands whose variables are gone afterwards."""
    return "", follow(shell.branch(), body)[1]


def _pipeline(shell: Shell, node: Pipeline) -> tuple[Flow, Result]:
    if len(node.commands) == 1:
        flow, result = guarded(shell, lambda: _node(shell, node.commands[0]))
        return flow, opposite(result) if node.negated else result
    text: str | None = None
    results: list[Result] = []
    for number, command in enumerate(node.commands):
        branch = shell.branch()
        branch.output = []
        results.append(_node(branch, command)[1])
        if number == 0:
            known = all(value.known for value in branch.output)
            text = together(value.text for value in branch.output) if known else None
        elif text is not None:
            words = expand(branch, command.words, substituted) if isinstance(command, Simple) else []
            text = filtered(words, text) if words and shell.output is not None else None
    if shell.output is not None:
        other = unknown("$(... | ...)", "the output of other commands")
        shell.output.append(other if text is None else Value(text))
    if shell.pipefail is not False and not all(results):
        return "", False if shell.pipefail and False in results else None
    return "", results[-1]


def substituted(shell: Shell, part: Substitution) -> Value:
    """The output of the commands in `$(...)`, where it is known."""
    branch = shell.branch()
    branch.output, branch.depth, branch.errexit = [], shell.depth + 1, False
    deeper(branch)
    branch.step(len(part.source))
    try:
        nodes = nested(part, str(shell.file or "the command line"))
    except CkptkitError as error:
        return unknown(part.source, error.message)
    shell.substitution = follow(branch, nodes)[1]
    gaps = tuple(gap for value in branch.output for gap in value.gaps)
    text = together(value.text for value in branch.output).rstrip("\n")
    # Of a text that is known but for a part of it, such as a heredoc with a variable, the rest counts.
    whole = all(value.text.strip() == value.gaps[0].source for value in branch.output if value.gaps)
    if gaps and (whole or any(gap.source.startswith("$(...") or gap.source not in text for gap in gaps)):
        return unknown(part.source, gaps[0].why)
    return Value(text, gaps)


def _simple(shell: Shell, node: Simple) -> tuple[Flow, Result]:
    words = expand(shell, node.words, substituted)
    if words and words[0].text == "local" and not shell.locals:
        return "", False
    if not words or words[0].text in _DECLARES:
        if words and shell.locals and words[0].text in _LOCAL:
            _declared(shell, words, {assignment.name for assignment in node.assignments})
        shell.special |= dict(_attributes(shell, words, node.line, "inluA"))
        shell.substitution = True
        for assignment in node.assignments:
            _assign(shell, assignment, substituted)
        shell.special |= dict(_attributes(shell, words, node.line, "r"))
        if not words:
            if shell.output is not None and not node.assignments:
                shell.output.append(unknown("$(<...)", f"the text of a file at {shell.place(node.line)}"))
            return "", shell.substitution
    elif node.assignments:
        return _with_assignments(shell, node, words)
    return _command(shell, node, words, {})


def _declared(shell: Shell, words: Sequence[Value], assigned: set[str]) -> None:
    """Makes the names behind `local` variables of the function, which are not set before they are assigned."""
    if any(word.text.startswith("-") and "g" in word.text for word in words[1:]):
        return
    for name in (word.text for word in words[1:] if word.text not in shell.locals[-1]):
        shell.locals[-1][name] = shell.variables.get(name)
        if name not in assigned and not name.startswith("-"):
            shell.drop(name)


def _attributes(shell: Shell, words: Sequence[Value], line: int, wanted: str) -> Iterator[tuple[str, str]]:
    """The variables to which an assignment gives another value than the one it says, as `declare -i` makes them."""
    flags = {flag for word in words[1:] if word.text.startswith("-") for flag in word.text[1:]}
    flags |= {"r"} if words and words[0].text == "readonly" else set()
    if declared := sorted(flags & set(wanted)):
        why = f"{'an array with indices, ' * (declared[0] == 'A')}declare -{declared[0]} at {shell.place(line)}"
        if "n" in declared:
            shell.unresolved[f"{why}: a name for another variable is not followed"] = None
        yield from ((word.text, why) for word in words[1:] if not word.text.startswith("-"))


def _with_assignments(shell: Shell, node: Simple, words: list[Value]) -> tuple[Flow, Result]:
    """`NAME=value command`: only the command sees them."""
    branch = shell.branch()
    for assignment in node.assignments:
        _assign(branch, assignment, substituted)
    given = {one.name: replace(branch.variables[one.name], exported=True) for one in node.assignments}
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
        return _ended(shell, name, words[1:], node.line)
    if node.target is not None:
        shell.written.add(Path(joined(shell, node.target, substituted).text).name)
        return _silent(shell, lambda: _command(shell, replace(node, target=None), words, given))
    if name in shell.functions:
        if (body := shell.functions[name]) is not None:
            return _call(shell, body, words)
        shell.unresolved[f"{shell.place(node.line)}: {name}: which function it is depends on a condition"] = None
        return "", None
    if name in ("source", ".") and words[1:]:
        return source(_RUN, shell, words, node.line)
    if name in ("bash", "sh") and words[1:] and words[1].known and words[1].text.endswith(".sh"):
        return started(_RUN, shell, words, given)
    if name == "sbatch" and (command := given.get("COMMAND") or exported(shell, "COMMAND")):
        # Slurm scripts of NeMo-RL run the command that this variable holds.
        return inner(_RUN, shell, command.text, node.line)
    if name == "eval":
        return evaluate(_RUN, shell, words[1:], node.line)
    if name in ("[", "test"):
        return "", decide(words[1:-1] if name == "[" else words[1:], patterns=False)
    if name.startswith("-"):
        shell.lost.append((tuple(words), node.line, shell.file))
        return "", None
    if start := start_of(words, shell, given, node.line):
        shell.starts.append(start)
        return "", None
    if (text := inner_script(words)) is not None:
        return inner(_RUN, shell, text, node.line)
    here = joined(shell, node.here, substituted) if node.here else None
    known, result = known_command(shell, words, here, node.line)
    if not known and shell.output is not None:
        shell.output.append(unknown(f"$({name})", f"the output of `{name}` at {shell.place(node.line)}"))
    return "", result


def _ended(shell: Shell, name: str, words: Sequence[Value], line: int) -> tuple[Flow, Result]:
    """`exit`, `return`, `break` and `continue`, which a number follows."""
    number = int(words[0].text) if words and words[0].known and re.fullmatch(r"[0-9]{1,9}", words[0].text) else None
    if name in ("break", "continue"):
        if words and not number:
            return "maybe", None
        return (f"{name}:{min(number or 1, shell.loops)}", True) if shell.loops else ("", True)
    if name == "return" and not shell.callers:
        return "", False
    if name == "exit":
        shell.stopped.append(shell.place(line))
    return name, shell.result if not words else None if number is None else number & 255 == 0


def _call(shell: Shell, body: Node, words: list[Value]) -> tuple[Flow, Result]:
    """A function, with its words as positional parameters."""
    before, uses, loops = shell.arguments, shell.argument_uses, shell.loops
    shell.arguments, shell.depth, shell.argument_uses = tuple(words[1:]), shell.depth + 1, []
    shell.callers, shell.loops = shell.callers + 1, 0
    deeper(shell)
    shell.locals.append({})
    flow, result = _node(shell, body)
    for name, variable in shell.locals.pop().items():
        shell.restore(name, variable)
    shell.arguments, shell.depth, shell.argument_uses = before, shell.depth - 1, uses
    shell.callers, shell.loops = shell.callers - 1, loops
    return ("exit" if flow == "exit" else ""), None if flow == "maybe" else result


def _assign(shell: Shell, assignment: Assignment, run: Run) -> bool:
    """Assigns, and returns whether all of the value is known."""
    name, line = assignment.name, assignment.line
    before = shell.variables.get(name)
    if assignment.array is not None:
        values = tuple(expand(shell, assignment.array, run))
        if any(_INDEXED.match(value.text) for value in values) or name in shell.special:
            shell.forget(name, shell.special.get(name) or f"an array with indices at {shell.place(line)}")
            return False
        kept = before.values if assignment.append and before else ()
        shell.assign_array(name, (*kept, *values))
        return all(value.known for value in values)
    value = joined(shell, assignment.value, run)
    value = replace(value, file=shell.file, line=line)
    if value.gaps and value.text == value.gaps[0].source:
        value = replace(value, text=f"${{{name}}}", gaps=(Gap(f"${{{name}}}", value.gaps[0].why),))
    if assignment.index is not None or (before and before.array and name not in shell.special):
        _assign_element(shell, assignment, value, before, run)
    elif assignment.append and before and before.values:
        old = before.values[0]
        shell.assign(name, replace(value, text=old.text + value.text, gaps=(*old.gaps, *value.gaps)))
    else:
        shell.assign(name, value)
    return value.known


def _assign_element(shell: Shell, assignment: Assignment, value: Value, before: Variable | None, run: Run) -> None:
    """`A[index]=value`; without an index it is the first element."""
    values = list(before.values) if before else []
    try:
        index = calculate_in(shell, assignment.index or "0", run)
    except ArithmeticFault:
        index = -1
    if index < -len(values):
        shell.unresolved[f"{shell.place(assignment.line)}: bash refuses to set an element before the first"] = None
    named = re.fullmatch(r"[A-Za-z_]\w*", assignment.index or "") and shell.lookup(assignment.index or "") is None
    special = assignment.name in shell.special or any(one.maybe for one in values[: index + 1])
    if named or special or assignment.append or not 0 <= index <= len(values):
        shell.forget(assignment.name, f"an element set at {shell.place(assignment.line)}")
        return
    values[index : index + 1] = [value]
    shell.assign_array(assignment.name, tuple(values))


_RUN = Runner(follow, _node, substituted)
