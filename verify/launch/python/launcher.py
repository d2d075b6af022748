"""The launch that a launcher of slime or miles in Python is: `run_*.py`, read and never run.

Source: slime and miles `utils/external_utils/command_utils.py` (execute_train) and `typer_utils.py` (dataclass_cli):
the fields of a dataclass are the options of the launcher, its function gives one text of arguments to `execute_train`.
The arguments of the model are those of `scripts/models/NAME.sh` in slime's checkout, and of `NAME.py` in miles'.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.launch.python.model_args import model_arguments
from ckptkit.verify.launch.python.statements import Follower
from ckptkit.verify.launch.python.values import (
    ENVIRONMENT,
    MISSING,
    Class,
    Conditional,
    Module,
    Piece,
    PythonFunction,
    State,
    TooMuchPythonError,
    Unknown,
    join_pieces,
    split_pieces,
    why_unread,
)
from ckptkit.verify.launch.shell.read import read_command
from ckptkit.verify.launch.shell.values import Gap, ShellValue
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord, Word

_START = "execute_train"
# They start processes, or read what the machine of the job has.
_QUIET: frozenset[str] = frozenset(
    {
        *("exec_command", "exec_command_cpu", "exec_command_gpu", "exec_command_multi_node", "convert_checkpoint"),
        "fp8_cast_bf16",
        *("hf_download_dataset", "rsync_simple", "ssh_start_ray_workers", "start_mooncake_master"),
    }
)
_TOOL = Path("miles/utils/external_utils/model_args_utils.py")
_MARKS = (_TOOL, Path("slime/utils/external_utils/command_utils.py"))
# Variables that name a checkout, and what the launcher's own variables begin with.
_CHECKOUTS = ("SLIME_DIR", "SLIME", "MILES_DIR", "MILES")
_PREFIXES = ("SLIME_SCRIPT_", "MILES_SCRIPT_")


@dataclass(frozen=True)
class _Started:
    """A call of `execute_train`: its arguments by name, its line, and the variables at that point."""

    named: Mapping[str, Any]
    line: int
    environment: Mapping[str, Any]


def read_launcher(script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchText:
    """What a launcher in Python gives to its trainer. `arguments` are its own: a command and options of its fields.

    Raises CkptkitError where the file cannot be read or starts no trainer.
    """
    started: list[_Started] = []

    def start(state: State, given: Sequence[Any], named: Mapping[str, Any], node: ast.Call) -> Any:
        names = ("train_args", "num_gpus_per_node", "megatron_model_type", "train_script")
        variables = dict(state.objects[ENVIRONMENT])
        started.append(_Started(dict(zip(names, given, strict=False)) | dict(named), node.lineno, variables))
        return None

    # Where the checkout may be: above the launcher, or where a variable says.
    named = [Path(environment[name]).absolute() for name in _CHECKOUTS if environment.get(name)]
    folders = [*script.absolute().parents, *named]
    root = next((folder for folder in folders if any((folder / mark).is_file() for mark in _MARKS)), None)
    watched = {_START: start} | dict.fromkeys(_QUIET, lambda *_: None)
    follower = Follower(root or script.absolute().parent, environment, watched)
    try:
        module = follower.module(script)
        _run_commands(follower, module, list(arguments))
    except OSError as error:
        reason = error.strerror or error
        raise CkptkitError(f"{script}: {reason}", "give the path of the launcher itself") from error
    except SyntaxError as error:
        place = f"{script}:{error.lineno}" if error.lineno else str(script)
        raise CkptkitError(f"{place}: {error.msg}", "check it with `python3 -m py_compile`") from error
    except (TooMuchPythonError, RecursionError, MemoryError, ValueError) as error:
        return LaunchText(unresolved=(f"{script}: {why_unread(error)}, so it was not read to its end",))
    if not started:
        hint = f"give a launcher that calls `{_START}`, or paste the command that it prints into a file"
        raise CkptkitError(f"{script}: no call of {_START} is reached", hint)
    texts = [_launch(script, folders, one) for one in started]
    if len({tuple(word.text for word in text.words) for text in texts}) > 1:
        lines = " and ".join(dict.fromkeys(f"{script}:{one.line}" for one in started))
        more = f"its commands start trainers with different arguments, at {lines}"
        return LaunchText(unresolved=(f"{more}: give the command that is meant as the first word behind --",))
    if root is None and texts[0].unresolved:
        missing = f"{_MARKS[1]} (miles: {_TOOL}) is in no folder above it"
        why = f"{script}: {missing}, so its imports are not known: set SLIME_DIR or MILES_DIR to the checkout"
        return replace(texts[0], unresolved=(why,))
    return replace(texts[0], directory=root)


def _run_commands(follower: Follower, module: Module, arguments: list[str]) -> None:
    """Follows the functions that the launcher offers: that of `typer.run`, or those with `@app.command()`."""
    commands = {name.replace("_", "-"): function for name, function in _commands(module)}
    if not commands:
        follower.main(module)
    if arguments and arguments[0] in commands:
        commands = {arguments[0]: commands[arguments[0]]}
        arguments = arguments[1:]
    for function in commands.values():
        state = follower.state
        follower.state = state.branch()
        parameter = next(iter(function.node.args.args), None)
        kind = follower.expressions(module).value(parameter.annotation) if parameter and parameter.annotation else None
        variables = follower.state.objects[ENVIRONMENT]
        made = follower.create(kind, _given(kind, arguments, variables)) if isinstance(kind, Class) else None
        call = ast.copy_location(ast.Call(ast.Name("main", ast.Load()), [], []), function.node)
        # Options that the launcher itself refuses start nothing.
        if not isinstance(made, Unknown):
            follower.call(follower.state, module, function, [] if made is None else [made], {}, call)
        follower.state = state


def _commands(module: Module) -> Iterator[tuple[str, PythonFunction]]:
    tree = {name: value for name, value in module.names.items() if isinstance(value, PythonFunction)}
    for name, function in tree.items():
        if isinstance(function.node, ast.FunctionDef) and function.module is module:
            decorators = [ast.unparse(one) for one in function.node.decorator_list]
            if any(".command" in one or one.endswith("dataclass_cli") for one in decorators):
                yield name, function


def _given(kind: Class, arguments: Sequence[str], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that variables (`MILES_SCRIPT_NUM_NODES`) and options give: `--num-nodes 4`, `--flag`, `--no-flag`.

    Raises CkptkitError for another option.
    """
    given: dict[str, Any] = {
        name: value if isinstance(value, Unknown) else _converted(ast.unparse(field.annotation), str(value))
        for name, field in kind.fields.items()
        for prefix in _PREFIXES
        if (value := environment.get(f"{prefix}{name.upper()}")) is not None
    }
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).partition("=")
        field = name.removeprefix("--").replace("-", "_")
        negated = field.removeprefix("no_") if field not in kind.fields else ""
        if not name.startswith("--") or (field not in kind.fields and negated not in kind.fields):
            raise CkptkitError(f"{name} is not an option of {kind.name}", f"its fields are {', '.join(kind.fields)}")
        annotation = ast.unparse(kind.fields[negated or field].annotation)
        if annotation.startswith("bool") and not equals:
            given[negated or field] = not negated
        else:
            text = value if equals else words.pop(0) if words else ""
            given[field] = _converted(annotation, text)
    return given


def _converted(annotation: str, text: str) -> Any:
    if "int" in annotation and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if annotation.startswith("bool"):
        return text.lower() in ("true", "1", "yes")
    if "float" in annotation:
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _launch(script: Path, folders: Sequence[Path], started: _Started) -> LaunchText:
    """The text of one call of `execute_train`, as a command of a shell that has variables for what is not known."""
    variables: dict[str, tuple[ShellValue, ...]] = {}
    environment = {name: value for name, value in started.environment.items() if isinstance(value, str)}
    kind = started.named.get("megatron_model_type", MISSING)
    names = (folder / "scripts" / "models" / f"{kind}{ending}" for folder in folders for ending in (".py", ".sh"))
    # A name that no file can have is none here.
    file = next((path for path in names if os.path.isfile(path)), None) if isinstance(kind, str) else None
    model = _model(script, file, kind, started.environment)
    arguments = split_pieces(started.named.get("train_args", MISSING))
    program = started.named.get("train_script", "train.py")
    name = program if isinstance(program, str) else "train.py"
    sourced = f"source {shlex.quote(str(file))} && " if file and file.suffix == ".sh" else ""
    pieces: tuple[Piece, ...] = (f"{sourced}python3 {shlex.quote(name)} ", *model, " ", *arguments)
    text = _shell(list(pieces), variables, script)
    files = [script, *([file] if file else [])]
    read = read_command(text, variables, script, started.line, environment)
    words = tuple(_placed(read.words, _lines(files), script, started.line))
    return replace(read, words=words, environment=dict(_environment(started, script)))


def _model(script: Path, file: Path | None, kind: Any, environment: Mapping[str, Any]) -> tuple[Piece, ...]:
    """The arguments of the model, each quoted; those of a script of bash as its array."""
    if kind is None:
        return ()
    if file and file.suffix == ".sh":
        return ("${MODEL_ARGS[@]}",)
    if file:
        found = model_arguments(file.parents[2] / _TOOL, kind, environment)
        if isinstance(found, str):
            return (" ".join(shlex.quote(word) for word in found.split()),)
        return split_pieces(found)
    if isinstance(kind, str):
        where = f"scripts/models/{kind}.sh (miles: .py) is in no folder above {script.parent.absolute()}"
        why = f"{where}: set SLIME_DIR or MILES_DIR to the checkout that has it"
        return (Unknown(f"MODEL_ARGS of {kind}", why),)
    gaps = [piece for piece in split_pieces(kind) if not isinstance(piece, str)]
    return (Unknown("MODEL_ARGS of a model", gaps[0].why if gaps else "its name is not known"),)


def _shell(pieces: list[Piece], variables: dict[str, tuple[ShellValue, ...]], script: Path) -> str:
    """These parts as text of a shell; a part that is not known becomes a variable, one that may be there an array."""
    text = ""
    for number, piece in enumerate(pieces):
        if isinstance(piece, str):
            text += piece
            continue
        name = f"ckptkit_{len(variables)}"
        after = pieces[number + 1] if number + 1 < len(pieces) else " "
        inside = join_pieces(piece.pieces) if isinstance(piece, Conditional) else ""
        # Whole words, where blanks stand around them.
        whole = not text or text[-1].isspace()
        ends = (isinstance(inside, str) and inside[-1:].isspace()) or (isinstance(after, str) and after[:1].isspace())
        variables[name] = ()
        if isinstance(piece, Conditional) and isinstance(inside, str) and whole and ends and not _special(inside):
            variables[name] = tuple(ShellValue(word, (), script, None, piece.why) for word in shlex.split(inside))
            text += f"${{{name}[@]}} "
            continue
        source = piece.source if isinstance(piece, Unknown) else "".join(_sources(piece.pieces))
        shown = f"{{{source}}}"
        # A part by itself may be any number of options, except behind an option, whose value it is.
        before = text.split()[-1:]
        is_value = any(word.startswith("--") and "=" not in word for word in before)
        many = whole and isinstance(after, str) and (after[:1].isspace() or not after)
        gap = Gap(f"{shown}[@]" if many and not is_value else shown, piece.why)
        variables[name] = (ShellValue(gap.source, (gap,), script, None, is_unsplit=True),)
        text += f"${{{name}}}"
    return text


def _special(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return True
    return any(sign in text for sign in "$`\\")


def _sources(pieces: Sequence[Piece]) -> Iterator[str]:
    for piece in pieces:
        yield piece if isinstance(piece, str) else piece.source if isinstance(piece, Unknown) else "..."


def _lines(files: Sequence[Path]) -> dict[str, tuple[Path, int]]:
    """Where each option is written first."""
    found: dict[str, tuple[Path, int]] = {}
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            for option in re.findall(r"--[A-Za-z][\w-]*", line.partition("#")[0]):
                found.setdefault(option, (file, number))
    return found


def _placed(words: Sequence[Word], lines: Mapping[str, tuple[Path, int]], script: Path, line: int) -> Iterator[Word]:
    """Words at the line of their option."""
    place = script, line
    for word in words:
        if word.text.startswith("--"):
            place = lines.get(word.text.partition("=")[0], (script, line))
        yield replace(word, file=place[0], line=place[1])


def _environment(started: _Started, script: Path) -> Iterator[tuple[str, Word]]:
    """The variables that the launcher gives to the trainer."""
    variables = started.named.get("extra_env_vars", None)
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if isinstance(name, str) and isinstance(value, str):
            yield name, Word(value, script, started.line)
        elif isinstance(name, str):
            why = value.why if isinstance(value, Unknown) else "not all of it is known"
            yield name, UnresolvedWord(name, script, started.line, why)
