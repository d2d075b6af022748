"""Simulates scripts: assignments, conditions, loops, functions, other scripts. Starts no process and writes no file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.storage.regular import read_regular
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.shell import syntax
from ckptkit.verify.launch.shell.arithmetic import ArithmeticFault
from ckptkit.verify.launch.shell.commands import Result, filter_text, run_known_command
from ckptkit.verify.launch.shell.conditions import decide, negate
from ckptkit.verify.launch.shell.expand import BRACES, evaluate_arithmetic, expand, expand_text, resolve_path
from ckptkit.verify.launch.shell.operators import matches
from ckptkit.verify.launch.shell.parser import parse
from ckptkit.verify.launch.shell.syntax import Node
from ckptkit.verify.launch.shell.trainers import find_start, inner_script
from ckptkit.verify.launch.shell.values import Gap, Shell, ShellValue, Variable, join_texts, merge_shells, unknown_value

_DECLARES = frozenset({"export", "declare", "local", "readonly", "typeset"})
_LOCAL = frozenset({"local", "declare", "typeset"})
_INDEXED = re.compile(r"\[[^]]*\]\+?=")
_MAX_FILE = 300_000
_QUIET = frozenset({"activate", ".bashrc", ".bash_profile", ".profile"})
_ROUNDS = 3  # of a loop with an unknown number of rounds
# The end of a list of commands: "", "exit", "return", "break:1" or "continue:1" with the number of loops, or "maybe" if
# it is not known whether the list ended early.
Flow = str
Outcome = tuple[Flow, Result]
Body = Callable[[Shell], Flow]


def follow(shell: Shell, nodes: Sequence[Node]) -> Outcome:
    """Runs commands in order. Returns how they ended, and whether the last one succeeded."""
    result: Result = True
    for number, node in enumerate(nodes):
        flow, result = _node(shell, node)
        if flow == "maybe":
            _optionally(shell, _body(nodes[number + 1 :]), node.line)
            return "maybe", None
        if flow:
            return flow, result
    return "", result


def _node(shell: Shell, node: Node) -> Outcome:
    """Runs one command. Under `set -e` a failure ends the script, unless a condition uses the result."""
    flow, shell.result = _dispatch(shell, node)
    is_checked = isinstance(node, syntax.Simple | syntax.Calculation | syntax.Test)
    is_checked |= isinstance(node, syntax.CommandGroup) and node.subshell
    is_checked |= isinstance(node, syntax.Pipeline) and not node.negated
    if flow or shell.result is not False or shell.guarded or not is_checked or shell.errexit is False:
        return flow, shell.result
    if shell.errexit is None:
        return "maybe", None
    shell.stopped.append(shell.place(node.line))
    return "exit", False


def _dispatch(shell: Shell, node: Node) -> Outcome:
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
            return _case(shell, node, expand_text(shell, node.subject), 0)
        case syntax.For() | syntax.ForArithmetic():
            shell.result = True
            return _loop(shell, node), shell.result
        case syntax.While():
            flow = _loop(shell, node)
            return flow, shell.result if flow in ("exit", "return") else None
        case syntax.CommandGroup(loud, silent=True):
            return _silently(shell, lambda: follow(shell, loud))
        case syntax.CommandGroup(body, subshell=True):  # its variables are gone afterwards
            return "", follow(shell.branch(), body)[1]
        case syntax.CommandGroup(body):
            return follow(shell, body)
        case syntax.ShellFunction(name, body):
            shell.functions[name] = body
            return "", True
        case syntax.Calculation(text):
            return "", _calculate(shell, text)
        case syntax.Test(words):
            pairs = zip(words, ["", *(word.plain for word in words)], strict=False)
            values = [expand_text(shell, word, is_pattern=before in ("=", "==", "!=")) for word, before in pairs]
            return "", decide(values, patterns=True)


def _silently(shell: Shell, act: Callable[[], Outcome]) -> Outcome:
    """Runs commands with their output in a file."""
    output, shell.output = shell.output, None
    outcome = act()
    shell.output = output
    return outcome


def _pipeline(shell: Shell, node: syntax.Pipeline) -> Outcome:
    if len(node.commands) == 1:
        flow, result = _guarded(shell, lambda: _node(shell, node.commands[0]))
        return flow, negate(result) if node.negated else result
    text: str | None = None
    results: list[Result] = []
    for number, command in enumerate(node.commands):
        branch = shell.branch()
        branch.output = []
        results.append(_node(branch, command)[1])
        if number == 0:
            known = all(value.known for value in branch.output)
            text = join_texts(value.text for value in branch.output) if known else None
        elif text is not None:
            words = expand(branch, command.words) if isinstance(command, syntax.Simple) else []
            text = filter_text(words, text) if words and shell.output is not None else None
    if shell.output is not None:
        unknown = unknown_value("$(... | ...)", "the output of other commands")
        shell.output.append(unknown if text is None else ShellValue(text))
    if shell.pipefail is not False and not all(results):
        return "", False if shell.pipefail and False in results else None
    return "", results[-1]


def run_substitution(shell: Shell, part: syntax.Substitution) -> ShellValue:
    """The output of the commands in `$(...)`, as far as it is known."""
    branch = shell.branch()
    branch.output, branch.errexit = [], False
    branch.deeper()
    branch.step(len(part.source))
    try:
        nodes = parse(part.text, str(shell.file or "the command line"), part.line)
    except CkptkitError as error:
        return unknown_value(part.source, error.message)
    shell.substitution = follow(branch, nodes)[1]
    gaps = tuple(gap for value in branch.output for gap in value.gaps)
    text = join_texts(value.text for value in branch.output).rstrip("\n")
    # The known parts of a text with gaps, such as a heredoc with a variable, are kept.
    is_unknown = all(value.text.strip() == value.gaps[0].source for value in branch.output if value.gaps)
    if gaps and (is_unknown or any(gap.source.startswith("$(...") or gap.source not in text for gap in gaps)):
        return unknown_value(part.source, gaps[0].why)
    return ShellValue(text, gaps)


def _simple(shell: Shell, node: syntax.Simple) -> Outcome:
    words = expand(shell, node.words)
    if words and words[0].text == "local" and not shell.locals:
        return "", False
    if not words or words[0].text in _DECLARES:
        if words and shell.locals and words[0].text in _LOCAL:
            _declare_locals(shell, words, {assignment.name for assignment in node.assignments})
        _declare_special(shell, words, node.line, "inluA")
        shell.substitution = True
        for assignment in node.assignments:
            _assign(shell, assignment)
        _declare_special(shell, words, node.line, "r")
        if not words:
            if shell.output is not None and not node.assignments:
                shell.output.append(unknown_value("$(<...)", f"the text of a file at {shell.place(node.line)}"))
            return "", shell.substitution
    elif node.assignments:
        return _with_assignments(shell, node, words)
    return _command(shell, node, words, {})


def _declare_locals(shell: Shell, words: Sequence[ShellValue], assigned: set[str]) -> None:
    """Makes the names after `local` variables of the function, which are unset until they are assigned."""
    if any(word.text.startswith("-") and "g" in word.text for word in words[1:]):
        return
    for name in (word.text for word in words[1:] if word.text not in shell.locals[-1]):
        shell.locals[-1][name] = shell.variables.get(name)
        if name not in assigned and not name.startswith("-"):
            shell.drop(name)


def _declare_special(shell: Shell, words: Sequence[ShellValue], line: int, attributes: str) -> None:
    """Records variables with one of these attributes, such as `declare -i`, which change an assigned value."""
    flags = {flag for word in words[1:] if word.text.startswith("-") for flag in word.text[1:]}
    flags |= {"r"} if words and words[0].text == "readonly" else set()
    if declared := sorted(flags & set(attributes)):
        why = f"{'an array with indices, ' * (declared[0] == 'A')}declare -{declared[0]} at {shell.place(line)}"
        if "n" in declared:
            shell.unresolved[f"{why}: ckptkit does not follow a name for another variable"] = None
        shell.special |= {word.text: why for word in words[1:] if not word.text.startswith("-")}


def _with_assignments(shell: Shell, node: syntax.Simple, words: list[ShellValue]) -> Outcome:
    """`NAME=value command`: only the command sees the variables."""
    branch = shell.branch()
    for assignment in node.assignments:
        _assign(branch, assignment)
    variables = {one.name: replace(branch.variables[one.name], exported=True) for one in node.assignments}
    before = {name: shell.variables.get(name) for name in variables}
    shell.variables |= variables
    outcome = _command(shell, node, words, {name: one.values[0] for name, one in variables.items() if one.values})
    shell.restore(before)
    return outcome


def _command(shell: Shell, node: syntax.Simple, words: list[ShellValue], variables: dict[str, ShellValue]) -> Outcome:
    """Runs one command with its words; only it sees `variables`."""
    name = words[0].text
    if name in ("exit", "return", "break", "continue"):
        return _leave(shell, name, words[1:], node.line)
    if node.target is not None:
        shell.written.add(Path(expand_text(shell, node.target).text).name)
        return _silently(shell, lambda: _command(shell, replace(node, target=None), words, variables))
    if name in shell.functions:
        if (body := shell.functions[name]) is not None:
            return _call(shell, body, words)
        shell.report(node.line, f"{name}: an unknown condition defines this function")
        return "", None
    if name in ("source", ".") and words[1:]:
        return _source(shell, words, node.line)
    if name in ("bash", "sh") and words[1:] and words[1].known and words[1].text.endswith(".sh"):
        return _run_script(shell, words, variables)
    if name == "sbatch" and (command := (shell.exported | variables).get("COMMAND")):
        # Slurm scripts of NeMo-RL run the command in this variable.
        return _run_text(shell, command.text, node.line)
    if name == "eval":
        return _evaluate(shell, words[1:], node.line)
    if name in ("[", "test"):
        return "", decide(words[1:-1] if name == "[" else words[1:], patterns=False)
    if name.startswith("-"):
        shell.lost.append((tuple(words), node.line, shell.file))
        return "", None
    if start := find_start(words, shell, variables, node.line):
        shell.starts.append(start)
        return "", None
    if (text := inner_script(words)) is not None:
        return _run_text(shell, text, node.line)
    known, result = run_known_command(shell, words, expand_text(shell, node.here) if node.here else None, node.line)
    if not known and shell.output is not None:
        shell.output.append(unknown_value(f"$({name})", f"the output of `{name}` at {shell.place(node.line)}"))
    return "", result


def _leave(shell: Shell, name: str, words: Sequence[ShellValue], line: int) -> Outcome:
    """`exit`, `return`, `break` and `continue`, each with an optional number."""
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
    before, uses, loops = shell.arguments, shell.argument_uses, shell.loops
    shell.arguments, shell.argument_uses, shell.callers, shell.loops = tuple(words[1:]), [], shell.callers + 1, 0
    shell.deeper()
    shell.locals.append({})
    flow, result = _node(shell, body)
    shell.restore(shell.locals.pop())
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
            shell.assign_array(name, (*(before.values if assignment.append and before else ()), *values))
        return
    value = replace(expand_text(shell, assignment.value), file=shell.file, line=line)
    if value.gaps and value.text == value.gaps[0].source:
        value = replace(value, text=f"${{{name}}}", gaps=(Gap(f"${{{name}}}", value.gaps[0].why),))
    if assignment.index is not None or (before and before.array and name not in shell.special):
        _assign_element(shell, assignment, value, before)
    elif assignment.append and before and before.values:
        first = before.values[0]
        shell.assign(name, replace(value, text=first.text + value.text, gaps=(*first.gaps, *value.gaps)))
    else:
        shell.assign(name, value)


def _assign_element(shell: Shell, assignment: syntax.Assignment, value: ShellValue, before: Variable | None) -> None:
    """`A[index]=value`; the default of the index is 0."""
    values = list(before.values) if before else []
    try:
        index = evaluate_arithmetic(shell, assignment.index or "0")
    except ArithmeticFault:
        index = -1
    if index < -len(values):
        shell.report(assignment.line, "bash refuses to set an element before the first")
    is_key = re.fullmatch(r"[A-Za-z_]\w*", assignment.index or "") and shell.lookup(assignment.index or "") is None
    is_special = assignment.name in shell.special or any(one.condition for one in values[: index + 1])
    if is_key or is_special or assignment.append or not 0 <= index <= len(values):
        shell.forget(assignment.name, f"an element set at {shell.place(assignment.line)}")
        return
    values[index : index + 1] = [value]
    shell.assign_array(assignment.name, tuple(values))


def _guarded(shell: Shell, act: Callable[[], Outcome]) -> Outcome:
    """Runs commands of a condition, in which a failure ends nothing."""
    shell.guarded += 1
    outcome = act()
    shell.guarded -= 1
    return outcome


def _calculate(shell: Shell, text: str) -> Result:
    try:
        return evaluate_arithmetic(shell, text) != 0
    except ArithmeticFault:
        return None


def _either(shell: Shell, bodies: Sequence[Body], line: int, cause: str = "a condition") -> Flow:
    """Runs all bodies, of which an unknown one applies. Bodies that end the script have no part in the result."""
    why = f"it depends on {cause} at {shell.place(line)} that ckptkit cannot evaluate"
    before = len(shell.output or ())
    branches = [shell.branch() for _ in bodies]
    flows = [body(branch) for body, branch in zip(bodies, branches, strict=True)]
    if shell.output is not None and len(shell.output) > before:
        shell.output.append(unknown_value("$(...)", why))
    going = [branch for branch, flow in zip(branches, flows, strict=True) if flow != "exit"]
    if not going:
        return "exit"
    state = going[0]
    for other in going[1:]:
        state.variables = merge_shells(state, other, why)
        first, second = state.functions, other.functions
        names = first.keys() | second.keys()
        state.functions = {name: first.get(name) if first.get(name) == second.get(name) else None for name in names}
        state.directory = state.directory if state.directory == other.directory else None
        state.errexit = state.errexit if state.errexit == other.errexit else None
        state.pipefail = state.pipefail if state.pipefail == other.pipefail else None
        if state.arguments != other.arguments:
            longest = max(state.arguments, other.arguments, key=len)
            state.arguments = tuple(replace(value, condition=value.condition or why) for value in longest)
        state.result = None
    shell.take_over(state)
    different = set(flows) - {"exit"}
    return different.pop() if len(different) == 1 else "maybe"


def _optionally(shell: Shell, body: Body, line: int, cause: str = "a condition") -> Flow:
    """Runs a body that may not apply."""
    return _either(shell, [body, lambda _: ""], line, cause)


def _and_or(shell: Shell, node: syntax.AndOr) -> Outcome:
    flow, result = _guarded(shell, lambda: _node(shell, node.parts[0]))
    for number, (operator, part) in enumerate(zip(node.operators, node.parts[1:], strict=True), 2):
        if flow:
            return flow, result
        runs = result if operator == "&&" else negate(result)
        is_condition = number < len(node.parts)  # every part but the last
        shell.guarded += is_condition
        if runs is None:
            flow, result = _optionally(shell, _body([part]), part.line), None
        elif runs:
            flow, result = _node(shell, part)
        shell.guarded -= is_condition
    return flow, result


def _body(nodes: Sequence[Node]) -> Body:
    return lambda shell: follow(shell, nodes)[0]


def _if_command(shell: Shell, node: syntax.If, number: int) -> Outcome:
    if number == len(node.branches):
        return "", True
    conditions, body = node.branches[number]
    flow, result = _guarded(shell, lambda: follow(shell, conditions)) if conditions else ("", True)
    if flow:
        return flow, result
    if result is None:
        return _either(shell, [_body(body), lambda one: _if_command(one, node, number + 1)[0]], node.line), None
    return follow(shell, body) if result else _if_command(shell, node, number + 1)


def _case(shell: Shell, node: syntax.Case, subject: ShellValue, first: int) -> Outcome:
    for number in range(first, len(node.branches)):
        patterns = [expand_text(shell, pattern, is_pattern=True) for pattern in node.branches[number][0]]
        known = subject.known and all(pattern.known for pattern in patterns)
        results = [one.text == "*" or (matches(subject.text, one.text) if known else None) for one in patterns]
        if True in results:
            return _case_branch(shell, node, subject, number)
        if None in results:
            later = range(number, len(node.branches))
            bodies: list[Body] = [lambda one, at=at: _case_branch(one, node, subject, at)[0] for at in later]  # type: ignore[misc]
            return _either(shell, [*bodies, lambda _: ""], node.line), None
    return "", True


def _case_branch(shell: Shell, node: syntax.Case, subject: ShellValue, number: int) -> Outcome:
    """Runs a branch of a `case`, and the branches after it to which `;&` and `;;&` lead."""
    flow, result = follow(shell, node.branches[number][1])
    end = node.branches[number][2]
    if flow or end == ";;" or number + 1 == len(node.branches):
        return flow, result
    return _case_branch(shell, node, subject, number + 1) if end == ";&" else _case(shell, node, subject, number + 1)


def _loop(shell: Shell, node: syntax.For | syntax.ForArithmetic | syntax.While) -> Flow:
    shell.loops += 1
    flow = _for(shell, node) if isinstance(node, syntax.For) else _while(shell, node)
    shell.loops -= 1
    return flow


def _end_round(flow: Flow) -> Flow | None:
    """The end of a loop after this end of its body, or None if the next round follows."""
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
            return _for_unknown(shell, node, values)
        shell.assign(node.name, value)
        if (ended := _round(shell, node)) is not None:
            return ended
    return ""


def _round(shell: Shell, node: syntax.For | syntax.ForArithmetic | syntax.While) -> Flow | None:
    """Runs the body of a loop. Returns the end of the loop, or None if the next round follows."""
    flow = follow(shell, node.body)[0]
    return _repeat(shell, node) if flow == "maybe" else _end_round(flow)


def _for_unknown(shell: Shell, node: syntax.For, values: Sequence[ShellValue]) -> Flow:
    """Runs a loop over unknown words. A known word, or braces, make its body run for certain."""
    shell.forget(node.name, f"one of the words of a loop at {shell.place(node.line)}")
    refused = any(gap.source.startswith(("$((", "${!")) for value in values for gap in value.gaps)
    is_run = not refused and any(value.known or any(gap.why == BRACES for gap in value.gaps) for value in values)
    if is_run and (ended := _round(shell, node)) is not None:
        return ended
    return _repeat(shell, node)


def _repeat(shell: Shell, node: syntax.For | syntax.ForArithmetic | syntax.While) -> Flow:
    """Runs a loop with an unknown number of rounds, which may read variables that earlier rounds change."""
    flows: set[Flow] = set()

    def body(one: Shell) -> Flow:
        if isinstance(node, syntax.For):
            one.forget(node.name, f"one of the words of a loop at {shell.place(node.line)}")
        flow = _end_round(follow(one, node.body)[0]) or ""
        flows.add(flow)
        return flow

    for _ in range(_ROUNDS):
        before = shell.variables
        _optionally(shell, body, node.line, "a loop")
        if shell.variables == before:
            break
    return "maybe" if flows - {"", "exit"} else ""


def _while(shell: Shell, node: syntax.ForArithmetic | syntax.While) -> Flow:
    if isinstance(node, syntax.ForArithmetic):
        _calculate(shell, node.start)
    while True:
        shell.step()
        if isinstance(node, syntax.ForArithmetic):
            result = _calculate(shell, node.condition or "1")
        else:
            result = _guarded(shell, lambda: follow(shell, node.condition))[1]
            result = negate(result) if node.until else result
        if result is None:
            return _repeat(shell, node)
        if not result:
            return ""
        if (ended := _round(shell, node)) is not None:
            return ended
        if isinstance(node, syntax.ForArithmetic):
            _calculate(shell, node.step)


def _source(shell: Shell, words: list[ShellValue], line: int) -> Outcome:
    """`source FILE`: runs a file in this shell."""
    name = words[1].text
    path = resolve_path(shell, name) if words[1].known else None
    if Path(name).name in _QUIET:
        return "", None
    if path is None:
        why = f": {words[1].gaps[0]}" if words[1].gaps else ", an unknown path"
        shell.report(line, f"source {name}{why}")
        return "", None
    try:
        text = read_regular(path, _MAX_FILE).decode(errors="replace")
        shell.step(len(text))
        nodes = parse(text, str(path))
    except FileNotFoundError:
        return _report_missing(shell, path, name, line)
    except CkptkitError as error:
        shell.report(line, f"source {name}: {error.message}")
        return "", None
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        shell.report(line, f"source {shortened(name)}: {reason}")
        return "", None
    file, arguments, loops = shell.file, shell.arguments, shell.loops
    shell.file, shell.arguments, shell.callers, shell.loops = path, tuple(words[2:]) or arguments, shell.callers + 1, 0
    shell.deeper()
    flow, result = follow(shell, nodes)
    shell.file, shell.depth, shell.callers, shell.loops = file, shell.depth - 1, shell.callers - 1, loops
    shell.arguments = arguments if words[2:] else shell.arguments
    return ("exit" if flow == "exit" else ""), None if flow == "maybe" else result


def _run_script(shell: Shell, words: list[ShellValue], variables: Mapping[str, ShellValue]) -> Outcome:
    """`bash FILE WORDS`: runs another script, which sees exported variables only and changes none of this shell."""
    path = resolve_path(shell, words[1].text)
    branch = shell.branch()
    try:
        text = read_regular(path, _MAX_FILE).decode(errors="replace") if path else ""
        nodes = parse(text, str(path))
    except (OSError, ValueError, CkptkitError):
        return "", None
    exported = {name: variable for name, variable in shell.variables.items() if variable.exported}
    branch.variables = exported | {name: Variable((value,), exported=True) for name, value in variables.items()}
    branch.file = branch.script = path
    branch.functions, branch.arguments, branch.argument_uses = {}, tuple(words[2:]), []
    branch.errexit, branch.guarded, branch.callers, branch.loops = False, 0, 0, 0
    branch.deeper()
    branch.step(len(text))
    return "", follow(branch, nodes)[1]


def _report_missing(shell: Shell, path: Path, name: str, line: int) -> Outcome:
    """Reports a missing sourced file, at which `set -e` ends the script."""
    message = f"source {name}: the file does not exist"
    # A file that is not near the script may be on the job's machine, or made by a command.
    if shell.errexit and not shell.guarded and path.name not in shell.written and _is_near_script(shell, path):
        expected = "an existing file, since the script runs with `set -e`"
        actual = f"{shell.place(line)}: {message}, so the script ends here"
        shell.issues.append(Issue(expected, actual, f"check the path {path}", file=str(shell.file)))
    shell.report(line, message)
    return "", None


def _is_near_script(shell: Shell, path: Path) -> bool:
    """Whether a path is below the directory of the script, or below one of the two directories above that."""
    if shell.file is None:
        return False
    folder = Path(os.path.abspath(shell.file)).parent
    trees = [tree for tree in (folder, *folder.parents[:2]) if len(tree.parts) > 2]
    return any(Path(os.path.abspath(path)).is_relative_to(tree) for tree in trees)


def _evaluate(shell: Shell, words: Sequence[ShellValue], line: int) -> Outcome:
    if all(word.known for word in words):
        return _run_text(shell, join_texts((word.text for word in words), " "), line)
    shell.report(line, "eval of an unknown text")
    return "", None


def _run_text(shell: Shell, text: str, line: int) -> Outcome:
    """Runs a script inside a script, as for `bash -c`."""
    shell.deeper()
    shell.step(len(text))
    try:
        flow, result = follow(shell, parse(text, str(shell.file or "the command line"), line))
    except CkptkitError:
        shell.report(line, "it is run as a script, but is not one")
        flow, result = "", None
    shell.depth -= 1
    return flow, result
