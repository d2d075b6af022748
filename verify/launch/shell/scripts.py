"""Follows other scripts of a script: files that it sources or starts, and texts that it evaluates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.storage.regular import read_regular
from verify.issue import Issue
from verify.launch.shell.commands import Result
from verify.launch.shell.expand import script_directory
from verify.launch.shell.flow import Flow, Runner
from verify.launch.shell.parser import parse
from verify.launch.shell.values import MAX_DEPTH, Shell, TooMuchError, Value, Variable, together

_MAX_FILE = 300_000
_QUIET = frozenset({"activate", ".bashrc", ".bash_profile", ".profile"})


def deeper(shell: Shell) -> None:
    if shell.depth > MAX_DEPTH:
        raise TooMuchError(f"more than {MAX_DEPTH} functions, files and commands stand inside one another")


def source(run: Runner, shell: Shell, words: list[Value], line: int) -> tuple[Flow, Result]:
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
    before, shell.file, shell.depth = shell.file, path, shell.depth + 1
    arguments, loops = shell.arguments, shell.loops
    shell.arguments, shell.callers, shell.loops = tuple(words[2:]) or arguments, shell.callers + 1, 0
    deeper(shell)
    flow, result = run.follow(shell, nodes)
    shell.file, shell.depth, shell.callers, shell.loops = before, shell.depth - 1, shell.callers - 1, loops
    shell.arguments = arguments if words[2:] else shell.arguments
    return ("exit" if flow == "exit" else ""), None if flow == "maybe" else result


def exported(shell: Shell, name: str) -> Value | None:
    variable = shell.variables.get(name)
    return variable.values[0] if variable and variable.exported and variable.values else None


def started(run: Runner, shell: Shell, words: list[Value], given: Mapping[str, Value]) -> tuple[Flow, Result]:
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
    branch.depth += 1
    deeper(branch)
    branch.step(len(text))
    return "", run.follow(branch, nodes)[1]


def _not_there(shell: Shell, path: Path, named: str, line: int) -> tuple[Flow, Result]:
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


def evaluate(run: Runner, shell: Shell, words: Sequence[Value], line: int) -> tuple[Flow, Result]:
    if all(word.known for word in words):
        return inner(run, shell, together((word.text for word in words), " "), line)
    shell.unresolved[f"{shell.place(line)}: eval of a text that is not known"] = None
    return "", None


def inner(run: Runner, shell: Shell, text: str, line: int) -> tuple[Flow, Result]:
    """A script inside a script, as `bash -c` has it."""
    shell.depth += 1
    deeper(shell)
    shell.step(len(text))
    try:
        flow, result = run.follow(shell, parse(text, str(shell.file or "the command line"), line))
    except CkptkitError:
        shell.unresolved[f"{shell.place(line)}: a text that is run as a script, and is none"] = None
        flow, result = "", None
    shell.depth -= 1
    return flow, result
