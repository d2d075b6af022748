"""Follows conditions, `case`, loops and chains of commands: which are run, or may be, and what is then known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from verify.launch.shell.arithmetic import ArithmeticFault
from verify.launch.shell.commands import Result
from verify.launch.shell.conditions import opposite
from verify.launch.shell.expand import BRACES, Run, as_pattern, calculate_in, expand, joined, unknown
from verify.launch.shell.operators import matches
from verify.launch.shell.syntax import AndOr, Case, For, ForArithmetic, If, Node, While
from verify.launch.shell.values import Shell, Value, merged

# How a list of commands ended: "", "exit", "return", "break:1" or "continue:1" with the number of loops, or "maybe"
# where it may have ended early, and nobody knows.
Flow = str
Body = Callable[[Shell], Flow]
_ROUNDS = 3  # of a loop that nobody can count


@dataclass(frozen=True)
class Runner:
    """Follows lists of commands and single ones, and gives the output of those in `$(...)`."""

    follow: Callable[[Shell, Sequence[Node]], tuple[Flow, Result]]
    node: Callable[[Shell, Node], tuple[Flow, Result]]
    substituted: Run


def nothing(_: Shell) -> Flow:
    return ""


def guarded(shell: Shell, act: Callable[[], tuple[Flow, Result]]) -> tuple[Flow, Result]:
    """What is done by commands whose failure ends nothing, since a condition asks for it."""
    shell.guarded += 1
    outcome = act()
    shell.guarded -= 1
    return outcome


def calculated(run: Runner, shell: Shell, text: str) -> Result:
    try:
        return calculate_in(shell, text, run.substituted) != 0
    except ArithmeticFault:
        return None


def either(shell: Shell, bodies: Sequence[Body], where: str, what: str = "a condition") -> Flow:
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
        state.variables = merged(state, other, why)
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


def and_or(run: Runner, shell: Shell, node: AndOr) -> tuple[Flow, Result]:
    flow, result = guarded(shell, lambda: run.node(shell, node.parts[0]))
    for number, (operator, part) in enumerate(zip(node.operators, node.parts[1:], strict=True), 2):
        if flow:
            return flow, result
        wanted = result if operator == "&&" else opposite(result)
        # Only the last of them is not asked for its result.
        asked = number < len(node.parts)
        shell.guarded += asked
        if wanted is None:
            flow, result = either(shell, [body_of(run, [part]), nothing], shell.place(part.line)), None
        elif wanted:
            flow, result = run.node(shell, part)
        shell.guarded -= asked
    return flow, result


def body_of(run: Runner, nodes: Sequence[Node]) -> Body:
    return lambda shell: run.follow(shell, nodes)[0]


def if_command(run: Runner, shell: Shell, node: If, number: int) -> tuple[Flow, Result]:
    """The branches from `number` on."""
    if number == len(node.branches):
        return "", True
    conditions, body = node.branches[number]
    flow, result = guarded(shell, lambda: run.follow(shell, conditions)) if conditions else ("", True)
    if flow:
        return flow, result
    if result is None:
        other: Body = lambda one: if_command(run, one, node, number + 1)[0]  # noqa: E731 - it must remember the number
        return either(shell, [body_of(run, body), other], shell.place(node.line)), None
    return run.follow(shell, body) if result else if_command(run, shell, node, number + 1)


def case_command(run: Runner, shell: Shell, node: Case) -> tuple[Flow, Result]:
    return _branches(run, shell, node, joined(shell, node.subject, run.substituted), 0)


def _branches(run: Runner, shell: Shell, node: Case, subject: Value, first: int) -> tuple[Flow, Result]:
    """The branches of a `case` from `first` on."""
    for number in range(first, len(node.branches)):
        values = [as_pattern(shell, pattern, run.substituted) for pattern in node.branches[number][0]]
        known = subject.known and all(value.known for value in values)
        found = [
            True if value.text == "*" else matches(subject.text, value.text) if known else None for value in values
        ]
        if True in found:
            return _chosen(run, shell, node, subject, number)
        if None in found:
            later = range(number, len(node.branches))
            bodies: list[Body] = [lambda one, at=at: _chosen(run, one, node, subject, at)[0] for at in later]  # type: ignore[misc]
            return either(shell, [*bodies, nothing], shell.place(node.line)), None
    return "", True


def _chosen(run: Runner, shell: Shell, node: Case, subject: Value, number: int) -> tuple[Flow, Result]:
    """A branch that is taken, with those behind it that `;&` and `;;&` lead to."""
    flow, result = run.follow(shell, node.branches[number][1])
    end = node.branches[number][2]
    if flow or end == ";;" or number + 1 == len(node.branches):
        return flow, result
    if end == ";&":
        return _chosen(run, shell, node, subject, number + 1)
    return _branches(run, shell, node, subject, number + 1)


def loop(run: Runner, shell: Shell, node: For | ForArithmetic | While) -> Flow:
    shell.loops += 1
    flow = _for(run, shell, node) if isinstance(node, For) else _while(run, shell, node)
    shell.loops -= 1
    return flow


def _outer(flow: Flow) -> Flow | None:
    """How a loop ends whose body has ended so; None where it goes on with the next round."""
    kind, _, levels = flow.partition(":")
    if levels:
        return f"{kind}:{int(levels) - 1}" if int(levels) > 1 else "" if kind == "break" else None
    return flow or None


def _for(run: Runner, shell: Shell, node: For) -> Flow:
    if node.words is None:
        shell.argument_uses.append(0)
    values = list(shell.arguments) if node.words is None else expand(shell, node.words, run.substituted)
    for value in values:
        if not value.known:
            return _unknown_words(run, shell, node, values)
        shell.assign(node.name, value)
        flow = run.follow(shell, node.body)[0]
        if flow == "maybe":
            return _once(run, shell, node)
        if (ended := _outer(flow)) is not None:
            return ended
    return ""


def _unknown_words(run: Runner, shell: Shell, node: For, values: Sequence[Value]) -> Flow:
    """A loop over words that are not known. Where one of them is, or is braces, its body runs for certain."""
    shell.forget(node.name, f"one of the words of a loop at {shell.place(node.line)}")
    refused = any(gap.source.startswith(("$((", "${!")) for value in values for gap in value.gaps)
    if not refused and any(value.known or any(gap.why == BRACES for gap in value.gaps) for value in values):
        flow = run.follow(shell, node.body)[0]
        if flow != "maybe" and (ended := _outer(flow)) is not None:
            return ended
    return _once(run, shell, node)


def _once(run: Runner, shell: Shell, node: For | ForArithmetic | While) -> Flow:
    """A loop of which nobody knows how often its body runs: what one round changes, the next may read."""
    flows: set[Flow] = set()

    def body(one: Shell) -> Flow:
        if isinstance(node, For):
            one.forget(node.name, f"one of the words of a loop at {shell.place(node.line)}")
        flow = _outer(run.follow(one, node.body)[0]) or ""
        flows.add(flow)
        return flow

    for _ in range(_ROUNDS):
        before = shell.variables
        either(shell, [body, nothing], shell.place(node.line), "a loop")
        if shell.variables == before:
            break
    return "maybe" if flows - {"", "exit"} else ""


def _while(run: Runner, shell: Shell, node: ForArithmetic | While) -> Flow:
    if isinstance(node, ForArithmetic):
        calculated(run, shell, node.start)
    while True:
        shell.step()
        holds = _holds(run, shell, node)
        if holds is None:
            return _once(run, shell, node)
        if not holds:
            return ""
        flow = run.follow(shell, node.body)[0]
        if flow == "maybe":
            return _once(run, shell, node)
        if (ended := _outer(flow)) is not None:
            return ended
        if isinstance(node, ForArithmetic):
            calculated(run, shell, node.step)


def _holds(run: Runner, shell: Shell, node: ForArithmetic | While) -> Result:
    if isinstance(node, ForArithmetic):
        return calculated(run, shell, node.condition or "1")
    result = guarded(shell, lambda: run.follow(shell, node.condition))[1]
    return opposite(result) if node.until else result
