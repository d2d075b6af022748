"""Follows a script's commands: assignments, conditions, loops, functions and other scripts.

It starts no process and writes no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.storage.regular import read_regular
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.shell import syntax
from ckptkit.verify.launch.shell.arithmetic import ArithmeticFault
from ckptkit.verify.launch.shell.commands import Result, filtered, known_command
from ckptkit.verify.launch.shell.conditions import decide, opposite
from ckptkit.verify.launch.shell.expand import BRACES, calculate_in, expand, joined, script_directory, unknown
from ckptkit.verify.launch.shell.operators import matches
from ckptkit.verify.launch.shell.parser import parse
from ckptkit.verify.launch.shell.syntax import Node
from ckptkit.verify.launch.shell.trainers import inner_script, start_of
from ckptkit.verify.launch.shell.values import Gap, Shell, ShellValue, Variable, either_shell, together

_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_LOCAL = frozenset({"local", "declare", "typeset"})
_INDEXED = re.compile(r"\[[^]]*\]\+?=")
_MAX_FILE = 300_000
_QUIET = frozenset({"activate", ".bashrc", ".bash_profile", ".profile"})
_ROUNDS = 3  # of a loop that nobody can count
# How a list of commands ended: "", "exit", "return", "break:1" or "continue:1" with the number of loops, or "maybe"
# where it may have ended early, and nobody knows.
Flow = str
Outcome = tuple[Flow, Result]
Body = Callable[[Shell], Flow]


def follow(shell: Shell, nodes: Sequence[Node]) -> Outcome:
    """Follows commands one after the other. Returns how they ended, and whether the last one succeeded."""
    result: Result = True
    for number, node in enumerate(nodes):
        flow, result = _node(shell, node)
        if flow == "maybe":
            _either(shell, [_body_of(nodes[number + 1 :]), _nothing], shell.place(node.line))
            return "maybe", None
        if flow:
            return flow, result
    return "", result


def _node(shell: Shell, node: Node) -> Outcome:
    """One command. Under `set -e` one that fails ends the script, unless a condition asks for its result."""
    flow, shell.result = _done(shell, node)
    match node:
        case syntax.CommandGroup(subshell=alone):
            pass
        case syntax.Pipeline(negated=negated):
            alone = not negated
        case _:
            alone = isinstance(node, syntax.Simple | syntax.Calculation | syntax.Test)
    if flow or shell.result is not False or shell.guarded or not alone or shell.errexit is False:
        return flow, shell.result
    if shell.errexit is None:
        return "maybe", None
    shell.stopped.append(shell.place(node.line))
    return "exit", False


def _done(shell: Shell, node: Node) -> Outcome:
    shell.step()
    match node:
        case syntax.Simple():
            return _simple(shell, node)
        case syntax.AndOr():
            return _and_or(shell, node)
        case syntax.Pipeline():
            return _pipeline(shell, node)
        case syntax.If():
            return _if_command(shell, node, 0)
        case syntax.Case():
            return _branches(shell, node, joined(shell, node.subject), 0)
        case syntax.For() | syntax.ForArithmetic():
            shell.result = True
            return _loop(shell, node), shell.result
        case syntax.While():
            flow = _loop(shell, node)
            return flow, shell.result if flow in ("exit", "return") else None
        case syntax.CommandGroup(loud, silent=True):
            return _silent(shell, lambda: follow(shell, loud))
        case syntax.CommandGroup(body, subshell=True):  # its variables are gone afterwards
            return "", follow(shell.branch(), body)[1]
        case syntax.CommandGroup(body):
            return follow(shell, body)
        case syntax.ShellFunction(name, body):
            shell.functions[name] = body
            return "", True
        case syntax.Calculation(text):
            return "", _calculated(shell, text)
        case syntax.Test(words):
            return "", decide(_compared(shell, words), patterns=True)


def _compared(shell: Shell, words: Sequence[syntax.ShellWord]) -> list[ShellValue]:
    """The words of `[[ ]]`, of which those behind `==` are patterns."""
    before = ["", *(word.plain for word in words)]
    pairs = zip(words, before, strict=False)
    return [joined(shell, word, is_pattern=operator in ("=", "==", "!=")) for word, operator in pairs]


def _silent(shell: Shell, act: Callable[[], Outcome]) -> Outcome:
    """What is done by commands whose output goes to a file."""
    output, shell.output = shell.output, None
    outcome = act()
    shell.output = output
    return outcome


def _pipeline(shell: Shell, node: syntax.Pipeline) -> Outcome:
    if len(node.commands) == 1:
        flow, result = _guarded(shell, lambda: _node(shell, node.commands[0]))
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
            words = expand(branch, command.words) if isinstance(command, syntax.Simple) else []
            text = filtered(words, text) if words and shell.output is not None else None
    if shell.output is not None:
        other = unknown("$(... | ...)", "the output of other commands")
        shell.output.append(other if text is None else ShellValue(text))
    if shell.pipefail is not False and not all(results):
        return "", False if shell.pipefail and False in results else None
    return "", results[-1]


def substituted(shell: Shell, part: syntax.Substitution) -> ShellValue:
    """The output of the commands in `$(...)`, where it is known."""
    branch = shell.branch()
    branch.output, branch.errexit = [], False
    branch.deeper()
    branch.step(len(part.source))
    try:
        nodes = parse(part.text, str(shell.file or "the command line"), part.line)
    except CkptkitError as error:
        return unknown(part.source, error.message)
    shell.substitution = follow(branch, nodes)[1]
    gaps = tuple(gap for value in branch.output for gap in value.gaps)
    text = together(value.text for value in branch.output).rstrip("\n")
    # Of a text that is known but for a part of it, such as a heredoc with a variable, the rest counts.
    whole = all(value.text.strip() == value.gaps[0].source for value in branch.output if value.gaps)
    if gaps and (whole or any(gap.source.startswith("$(...") or gap.source not in text for gap in gaps)):
        return unknown(part.source, gaps[0].why)
    return ShellValue(text, gaps)


def _simple(shell: Shell, node: syntax.Simple) -> Outcome:
    words = expand(shell, node.words)
    if words and words[0].text == "local" and not shell.locals:
        return "", False
    if not words or words[0].text in _DECLARES:
        if words and shell.locals and words[0].text in _LOCAL:
            _declared(shell, words, {assignment.name for assignment in node.assignments})
        shell.special |= dict(_attributes(shell, words, node.line, "inluA"))
        shell.substitution = True
        for assignment in node.assignments:
            _assign(shell, assignment)
        shell.special |= dict(_attributes(shell, words, node.line, "r"))
        if not words:
            if shell.output is not None and not node.assignments:
                shell.output.append(unknown("$(<...)", f"the text of a file at {shell.place(node.line)}"))
            return "", shell.substitution
    elif node.assignments:
        return _with_assignments(shell, node, words)
    return _command(shell, node, words, {})


def _declared(shell: Shell, words: Sequence[ShellValue], assigned: set[str]) -> None:
    """Makes the names behind `local` variables of the function, which are not set before they are assigned."""
    if any(word.text.startswith("-") and "g" in word.text for word in words[1:]):
        return
    for name in (word.text for word in words[1:] if word.text not in shell.locals[-1]):
        shell.locals[-1][name] = shell.variables.get(name)
        if name not in assigned and not name.startswith("-"):
            shell.drop(name)


def _attributes(shell: Shell, words: Sequence[ShellValue], line: int, wanted: str) -> Iterator[tuple[str, str]]:
    """The variables to which an assignment gives another value than the one it says, as `declare -i` makes them."""
    flags = {flag for word in words[1:] if word.text.startswith("-") for flag in word.text[1:]}
    flags |= {"r"} if words and words[0].text == "readonly" else set()
    if declared := sorted(flags & set(wanted)):
        why = f"{'an array with indices, ' * (declared[0] == 'A')}declare -{declared[0]} at {shell.place(line)}"
        if "n" in declared:
            shell.unresolved[f"{why}: a name for another variable is not followed"] = None
        yield from ((word.text, why) for word in words[1:] if not word.text.startswith("-"))


def _with_assignments(shell: Shell, node: syntax.Simple, words: list[ShellValue]) -> Outcome:
    """`NAME=value command`: only the command sees them."""
    branch = shell.branch()
    for assignment in node.assignments:
        _assign(branch, assignment)
    given = {one.name: replace(branch.variables[one.name], exported=True) for one in node.assignments}
    before = {name: shell.variables.get(name) for name in given}
    shell.variables |= given
    outcome = _command(shell, node, words, {name: one.values[0] for name, one in given.items() if one.values})
    for name, variable in before.items():
        shell.restore(name, variable)
    return outcome


def _command(shell: Shell, node: syntax.Simple, words: list[ShellValue], given: dict[str, ShellValue]) -> Outcome:
    """One command with its words; `given` are the variables that only it sees."""
    name = words[0].text
    if name in ("exit", "return", "break", "continue"):
        return _ended(shell, name, words[1:], node.line)
    if node.target is not None:
        shell.written.add(Path(joined(shell, node.target).text).name)
        return _silent(shell, lambda: _command(shell, replace(node, target=None), words, given))
    if name in shell.functions:
        if (body := shell.functions[name]) is not None:
            return _call(shell, body, words)
        shell.unresolved[f"{shell.place(node.line)}: {name}: which function it is depends on a condition"] = None
        return "", None
    if name in ("source", ".") and words[1:]:
        return _source(shell, words, node.line)
    if name in ("bash", "sh") and words[1:] and words[1].known and words[1].text.endswith(".sh"):
        return _started(shell, words, given)
    if name == "sbatch" and (command := (shell.exported | given).get("COMMAND")):
        # Slurm scripts of NeMo-RL run the command that this variable holds.
        return _inner(shell, command.text, node.line)
    if name == "eval":
        return _evaluate(shell, words[1:], node.line)
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
    here = joined(shell, node.here) if node.here else None
    known, result = known_command(shell, words, here, node.line)
    if not known and shell.output is not None:
        shell.output.append(unknown(f"$({name})", f"the output of `{name}` at {shell.place(node.line)}"))
    return "", result


def _ended(shell: Shell, name: str, words: Sequence[ShellValue], line: int) -> Outcome:
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


def _call(shell: Shell, body: Node, words: list[ShellValue]) -> Outcome:
    """A function, with its words as positional parameters."""
    before, uses, loops = shell.arguments, shell.argument_uses, shell.loops
    shell.arguments, shell.argument_uses, shell.callers, shell.loops = tuple(words[1:]), [], shell.callers + 1, 0
    shell.deeper()
    shell.locals.append({})
    flow, result = _node(shell, body)
    for name, variable in shell.locals.pop().items():
        shell.restore(name, variable)
    shell.arguments, shell.depth, shell.argument_uses = before, shell.depth - 1, uses
    shell.callers, shell.loops = shell.callers - 1, loops
    return ("exit" if flow == "exit" else ""), None if flow == "maybe" else result


def _assign(shell: Shell, assignment: syntax.Assignment) -> None:
    name, line = assignment.name, assignment.line
    before = shell.variables.get(name)
    if assignment.array is not None:
        values = tuple(expand(shell, assignment.array))
        if any(_INDEXED.match(value.text) for value in values) or name in shell.special:
            shell.forget(name, shell.special.get(name) or f"an array with indices at {shell.place(line)}")
        else:
            kept = before.values if assignment.append and before else ()
            shell.assign_array(name, (*kept, *values))
        return
    value = joined(shell, assignment.value)
    value = replace(value, file=shell.file, line=line)
    if value.gaps and value.text == value.gaps[0].source:
        value = replace(value, text=f"${{{name}}}", gaps=(Gap(f"${{{name}}}", value.gaps[0].why),))
    if assignment.index is not None or (before and before.array and name not in shell.special):
        _assign_element(shell, assignment, value, before)
    elif assignment.append and before and before.values:
        old = before.values[0]
        shell.assign(name, replace(value, text=old.text + value.text, gaps=(*old.gaps, *value.gaps)))
    else:
        shell.assign(name, value)


def _assign_element(shell: Shell, assignment: syntax.Assignment, value: ShellValue, before: Variable | None) -> None:
    """`A[index]=value`; without an index it is the first element."""
    values = list(before.values) if before else []
    try:
        index = calculate_in(shell, assignment.index or "0")
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


def _nothing(_: Shell) -> Flow:
    return ""


def _guarded(shell: Shell, act: Callable[[], Outcome]) -> Outcome:
    """What is done by commands whose failure ends nothing, since a condition asks for it."""
    shell.guarded += 1
    outcome = act()
    shell.guarded -= 1
    return outcome


def _calculated(shell: Shell, text: str) -> Result:
    try:
        return calculate_in(shell, text) != 0
    except ArithmeticFault:
        return None


def _either(shell: Shell, bodies: Sequence[Body], where: str, what: str = "a condition") -> Flow:
    """One of these bodies is run, and nobody knows which. Those that end the script are not what comes after it."""
    why = f"it depends on {what} at {where} that cannot be decided"
    before = len(shell.output or ())
    ended: list[tuple[Shell, Flow]] = []
    for body in bodies:
        branch = shell.branch()
        ended.append((branch, body(branch)))
    if shell.output is not None and len(shell.output) > before:
        shell.output.append(unknown("$(...)", why))
    left = [(branch, flow) for branch, flow in ended if flow != "exit"]
    if not left:
        return "exit"
    state = left[0][0]
    for other, _ in left[1:]:
        state.variables = either_shell(state, other, why)
        names = state.functions.keys() | other.functions.keys()
        one, another = state.functions, other.functions
        state.functions = {name: one.get(name) if one.get(name) == another.get(name) else None for name in names}
        state.directory = state.directory if state.directory == other.directory else None
        state.errexit = state.errexit if state.errexit == other.errexit else None
        state.pipefail = state.pipefail if state.pipefail == other.pipefail else None
        if state.arguments != other.arguments:
            longest = max(state.arguments, other.arguments, key=len)
            state.arguments = tuple(replace(value, maybe=value.maybe or why) for value in longest)
        state.result = None
    shell.take_over(state)
    flows = {flow for _, flow in left}
    return flows.pop() if len(flows) == 1 else "maybe"


def _and_or(shell: Shell, node: syntax.AndOr) -> Outcome:
    flow, result = _guarded(shell, lambda: _node(shell, node.parts[0]))
    for number, (operator, part) in enumerate(zip(node.operators, node.parts[1:], strict=True), 2):
        if flow:
            return flow, result
        wanted = result if operator == "&&" else opposite(result)
        # Only the last of them is not asked for its result.
        asked = number < len(node.parts)
        shell.guarded += asked
        if wanted is None:
            flow, result = _either(shell, [_body_of([part]), _nothing], shell.place(part.line)), None
        elif wanted:
            flow, result = _node(shell, part)
        shell.guarded -= asked
    return flow, result


def _body_of(nodes: Sequence[Node]) -> Body:
    return lambda shell: follow(shell, nodes)[0]


def _if_command(shell: Shell, node: syntax.If, number: int) -> Outcome:
    """The branches from `number` on."""
    if number == len(node.branches):
        return "", True
    conditions, body = node.branches[number]
    flow, result = _guarded(shell, lambda: follow(shell, conditions)) if conditions else ("", True)
    if flow:
        return flow, result
    if result is None:
        other: Body = lambda one: _if_command(one, node, number + 1)[0]  # noqa: E731 - it must remember the number
        return _either(shell, [_body_of(body), other], shell.place(node.line)), None
    return follow(shell, body) if result else _if_command(shell, node, number + 1)


def _branches(shell: Shell, node: syntax.Case, subject: ShellValue, first: int) -> Outcome:
    """The branches of a `case` from `first` on."""
    for number in range(first, len(node.branches)):
        values = [joined(shell, pattern, is_pattern=True) for pattern in node.branches[number][0]]
        known = subject.known and all(value.known for value in values)
        found = [
            True if value.text == "*" else matches(subject.text, value.text) if known else None for value in values
        ]
        if True in found:
            return _chosen(shell, node, subject, number)
        if None in found:
            later = range(number, len(node.branches))
            bodies: list[Body] = [lambda one, at=at: _chosen(one, node, subject, at)[0] for at in later]  # type: ignore[misc]
            return _either(shell, [*bodies, _nothing], shell.place(node.line)), None
    return "", True


def _chosen(shell: Shell, node: syntax.Case, subject: ShellValue, number: int) -> Outcome:
    """A branch that is taken, with those behind it that `;&` and `;;&` lead to."""
    flow, result = follow(shell, node.branches[number][1])
    end = node.branches[number][2]
    if flow or end == ";;" or number + 1 == len(node.branches):
        return flow, result
    if end == ";&":
        return _chosen(shell, node, subject, number + 1)
    return _branches(shell, node, subject, number + 1)


def _loop(shell: Shell, node: syntax.For | syntax.ForArithmetic | syntax.While) -> Flow:
    shell.loops += 1
    flow = _for(shell, node) if isinstance(node, syntax.For) else _while(shell, node)
    shell.loops -= 1
    return flow


def _outer(flow: Flow) -> Flow | None:
    """How a loop ends whose body has ended so; None where it goes on with the next round."""
    kind, _, levels = flow.partition(":")
    if levels:
        return f"{kind}:{int(levels) - 1}" if int(levels) > 1 else "" if kind == "break" else None
    return flow or None


def _for(shell: Shell, node: syntax.For) -> Flow:
    if node.words is None:
        shell.argument_uses.append(0)
    values = list(shell.arguments) if node.words is None else expand(shell, node.words)
    for value in values:
        if not value.known:
            return _unknown_words(shell, node, values)
        shell.assign(node.name, value)
        flow = follow(shell, node.body)[0]
        if flow == "maybe":
            return _once(shell, node)
        if (ended := _outer(flow)) is not None:
            return ended
    return ""


def _unknown_words(shell: Shell, node: syntax.For, values: Sequence[ShellValue]) -> Flow:
    """A loop over words that are not known. Where one of them is, or is braces, its body runs for certain."""
    shell.forget(node.name, f"one of the words of a loop at {shell.place(node.line)}")
    refused = any(gap.source.startswith(("$((", "${!")) for value in values for gap in value.gaps)
    if not refused and any(value.known or any(gap.why == BRACES for gap in value.gaps) for value in values):
        flow = follow(shell, node.body)[0]
        if flow != "maybe" and (ended := _outer(flow)) is not None:
            return ended
    return _once(shell, node)


def _once(shell: Shell, node: syntax.For | syntax.ForArithmetic | syntax.While) -> Flow:
    """A loop of which nobody knows how often its body runs: what one round changes, the next may read."""
    flows: set[Flow] = set()

    def body(one: Shell) -> Flow:
        if isinstance(node, syntax.For):
            one.forget(node.name, f"one of the words of a loop at {shell.place(node.line)}")
        flow = _outer(follow(one, node.body)[0]) or ""
        flows.add(flow)
        return flow

    for _ in range(_ROUNDS):
        before = shell.variables
        _either(shell, [body, _nothing], shell.place(node.line), "a loop")
        if shell.variables == before:
            break
    return "maybe" if flows - {"", "exit"} else ""


def _while(shell: Shell, node: syntax.ForArithmetic | syntax.While) -> Flow:
    if isinstance(node, syntax.ForArithmetic):
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
        if (ended := _outer(flow)) is not None:
            return ended
        if isinstance(node, syntax.ForArithmetic):
            _calculated(shell, node.step)


def _holds(shell: Shell, node: syntax.ForArithmetic | syntax.While) -> Result:
    if isinstance(node, syntax.ForArithmetic):
        return _calculated(shell, node.condition or "1")
    result = _guarded(shell, lambda: follow(shell, node.condition))[1]
    return opposite(result) if node.until else result


def _source(shell: Shell, words: list[ShellValue], line: int) -> Outcome:
    """`source FILE`, whose variables stay."""
    named = words[1].text
    path = script_directory(shell, named) if words[1].known else None
    if Path(named).name in _QUIET:
        return "", None
    if path is None:
        why = f": {words[1].gaps[0]}" if words[1].gaps else ", a path that is not known"
        shell.unresolved[f"{shell.place(line)}: source {named}{why}"] = None
        return "", None
    try:
        text = read_regular(path, _MAX_FILE).decode(errors="replace")
    except FileNotFoundError:
        return _not_there(shell, path, named, line)
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        why = str((error.strerror if isinstance(error, OSError) else None) or error)
        shell.unresolved[f"{shell.place(line)}: source {shortened(named)}: {why}"] = None
        return "", None
    try:
        shell.step(len(text))
        nodes = parse(text, str(path))
    except CkptkitError as error:
        shell.unresolved[f"{shell.place(line)}: source {named}: {error.message}"] = None
        return "", None
    before, shell.file = shell.file, path
    arguments, loops = shell.arguments, shell.loops
    shell.arguments, shell.callers, shell.loops = tuple(words[2:]) or arguments, shell.callers + 1, 0
    shell.deeper()
    flow, result = follow(shell, nodes)
    shell.file, shell.depth, shell.callers, shell.loops = before, shell.depth - 1, shell.callers - 1, loops
    shell.arguments = arguments if words[2:] else shell.arguments
    return ("exit" if flow == "exit" else ""), None if flow == "maybe" else result


def _started(shell: Shell, words: list[ShellValue], given: Mapping[str, ShellValue]) -> Outcome:
    """`bash FILE WORDS`: another script, which sees what is exported and changes nothing here."""
    path = script_directory(shell, words[1].text)
    branch = shell.branch()
    try:
        text = read_regular(path, _MAX_FILE).decode(errors="replace") if path else ""
        nodes = parse(text, str(path))
    except (OSError, ValueError, CkptkitError):
        return "", None
    exported = {name: variable for name, variable in shell.variables.items() if variable.exported}
    branch.variables = exported | {name: Variable((value,), exported=True) for name, value in given.items()}
    branch.file = branch.script = path
    branch.functions, branch.arguments, branch.argument_uses = {}, tuple(words[2:]), []
    branch.errexit, branch.guarded, branch.callers, branch.loops = False, 0, 0, 0
    branch.deeper()
    branch.step(len(text))
    return "", follow(branch, nodes)[1]


def _not_there(shell: Shell, path: Path, named: str, line: int) -> Outcome:
    """A file that is sourced and is not there. Under `set -e` the script ends at it.

    Beside the script it is missing; elsewhere it may be one of the job's machine, or one that a command makes.
    """
    place = shell.place(line)
    if shell.errexit and not shell.guarded and path.name not in shell.written and _beside(shell, path):
        shell.issues.append(
            Issue(
                "a file that is there, since the script runs with `set -e`",
                f"{place}: source {named}: there is no such file, so the script ends here",
                f"check the path {path}",
                file=str(shell.file),
            )
        )
    shell.unresolved[f"{place}: source {named}: there is no such file"] = None
    return "", None


def _beside(shell: Shell, path: Path) -> bool:
    """Whether a path lies in the tree of the script: below its directory, or one of the two above."""
    if shell.file is None:
        return False
    here = Path(os.path.abspath(shell.file)).parent
    trees = [one for one in (here, *here.parents[:2]) if len(one.parts) > 2]
    return any(Path(os.path.abspath(path)).is_relative_to(one) for one in trees)


def _evaluate(shell: Shell, words: Sequence[ShellValue], line: int) -> Outcome:
    if all(word.known for word in words):
        return _inner(shell, together((word.text for word in words), " "), line)
    shell.unresolved[f"{shell.place(line)}: eval of a text that is not known"] = None
    return "", None


def _inner(shell: Shell, text: str, line: int) -> Outcome:
    """A script inside a script, as `bash -c` has it."""
    shell.deeper()
    shell.step(len(text))
    try:
        flow, result = follow(shell, parse(text, str(shell.file or "the command line"), line))
    except CkptkitError:
        shell.unresolved[f"{shell.place(line)}: a text that is run as a script, and is not one"] = None
        flow, result = "", None
    shell.depth -= 1
    return flow, result
