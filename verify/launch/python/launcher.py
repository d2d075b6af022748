"""Reads a launcher of slime or miles in Python, `run_*.py`, without running it.

Source: slime and miles `utils/external_utils/command_utils.py` (execute_train) and `typer_utils.py` (dataclass_cli):
the fields of a dataclass are the options of the launcher, and its function passes one text of arguments to
`execute_train`. The arguments of the model are in `scripts/models/NAME.sh` (slime) or `NAME.py` (miles).
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
    TooMuchError,
    Unknown,
    join_pieces,
    split_pieces,
    why_unread,
)
from ckptkit.verify.launch.shell.read import read_command
from ckptkit.verify.launch.shell.values import Gap, ShellValue
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord, Word

_START = "execute_train"
# Functions without a result that start processes or inspect the job's machine.
_IGNORED: Sequence[str] = (
    *("exec_command", "exec_command_cpu", "exec_command_gpu", "exec_command_multi_node", "convert_checkpoint"),
    *("fp8_cast_bf16", "hf_download_dataset", "rsync_simple", "ssh_start_ray_workers", "start_mooncake_master"),
)
_TOOL = Path("miles/utils/external_utils/model_args_utils.py")
_MARKS = (_TOOL, Path("slime/utils/external_utils/command_utils.py"))
# Variables with the path of a checkout, and prefixes of the launcher's own variables.
_CHECKOUTS = ("SLIME_DIR", "SLIME", "MILES_DIR", "MILES")
_PREFIXES = ("SLIME_SCRIPT_", "MILES_SCRIPT_")


@dataclass(frozen=True)
class _Start:
    """A call of `execute_train`: its arguments by name, its line, and the environment at that point."""

    named: Mapping[str, Any]
    line: int
    environment: Mapping[str, Any]


def read_launcher(script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchText:
    """The launch in a launcher with its own `arguments`. Raises CkptkitError if it cannot be read or starts none."""
    starts: list[_Start] = []

    def start(state: State, positional: Sequence[Any], named: Mapping[str, Any], node: ast.Call) -> None:
        names = ("train_args", "num_gpus_per_node", "megatron_model_type", "train_script")
        variables = dict(state.objects[ENVIRONMENT])
        starts.append(_Start(dict(zip(names, positional, strict=False)) | dict(named), node.lineno, variables))

    checkouts = [Path(environment[name]).absolute() for name in _CHECKOUTS if environment.get(name)]
    folders = [*script.absolute().parents, *checkouts]
    root = next((folder for folder in folders if any((folder / mark).is_file() for mark in _MARKS)), None)
    watched = {_START: start} | dict.fromkeys(_IGNORED, lambda *_: None)
    follower = Follower(root or script.absolute().parent, environment, watched)
    try:
        _run_commands(follower, follower.module(script), list(arguments))
    except OSError as error:
        raise CkptkitError(f"{script}: {error.strerror or error}", "pass the path of the launcher") from error
    except SyntaxError as error:
        place = f"{script}:{error.lineno}" if error.lineno else str(script)
        raise CkptkitError(f"{place}: {error.msg}", "check the launcher with `python3 -m py_compile`") from error
    except (TooMuchError, RecursionError, MemoryError, ValueError) as error:
        return LaunchText(unresolved=(f"{script}: {why_unread(error)}, so ckptkit did not read its end",))
    if not starts:
        hint = f"pass a launcher that calls `{_START}`, or paste the command that it prints into a file"
        raise CkptkitError(f"{script} does not call {_START}", hint)
    launches = [_launch(script, folders, one) for one in starts]
    if len({tuple(word.text for word in launch.words) for launch in launches}) > 1:
        lines = " and ".join(dict.fromkeys(f"{script}:{one.line}" for one in starts))
        why = f"the commands of the launcher start trainers with different arguments, at {lines}"
        return LaunchText(unresolved=(f"{why}: write the name of one command as the first word after --",))
    if root is None and launches[0].unresolved:
        missing = f"no folder above it has {_MARKS[1]} (miles: {_TOOL})"
        why = f"{script}: {missing}, so its imports are unknown: set SLIME_DIR or MILES_DIR to the checkout"
        return replace(launches[0], unresolved=(why,))
    return replace(launches[0], directory=root)


def _run_commands(follower: Follower, module: Module, arguments: list[str]) -> None:
    """Follows the commands of a launcher: the function of `typer.run`, or the functions with `@app.command()`."""
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
        options = [follower.create(kind, _parse_fields(kind, arguments, variables))] if isinstance(kind, Class) else []
        call = ast.copy_location(ast.Call(ast.Name("main", ast.Load()), [], []), function.node)
        # A launcher that refuses its options starts no trainer.
        if not any(isinstance(option, Unknown) for option in options):
            follower.call(follower.state, function, options, {}, call)
        follower.state = state


def _commands(module: Module) -> Iterator[tuple[str, PythonFunction]]:
    for name, value in module.names.items():
        match value:
            case PythonFunction(ast.FunctionDef() as node) if value.module is module:
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(".command" in text or text.endswith("dataclass_cli") for text in decorators):
                    yield name, value


def _parse_fields(kind: Class, arguments: Sequence[str], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in variables (`MILES_SCRIPT_NUM_NODES`) and options (`--num-nodes 4`). Raises CkptkitError."""
    values: dict[str, Any] = {
        name: value if isinstance(value, Unknown) else _convert(ast.unparse(field.annotation), str(value))
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
            raise CkptkitError(f"{name} is not an option of {kind.name}", f"choose one of {', '.join(kind.fields)}")
        annotation = ast.unparse(kind.fields[negated or field].annotation)
        if annotation.startswith("bool") and not equals:
            values[negated or field] = not negated
        else:
            values[field] = _convert(annotation, value if equals else words.pop(0) if words else "")
    return values


def _convert(annotation: str, text: str) -> Any:
    if "int" in annotation and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if annotation.startswith("bool"):
        return text.lower() in ("true", "1", "yes")
    if "float" in annotation:
        with suppress(ValueError):
            return float(text)
    return text


def _launch(script: Path, folders: Sequence[Path], start: _Start) -> LaunchText:
    """The launch in one call of `execute_train`, read as a shell command with variables for unknown parts."""
    environment = {name: value for name, value in start.environment.items() if isinstance(value, str)}
    model = start.named.get("megatron_model_type", MISSING)
    paths = (folder / "scripts" / "models" / f"{model}{ending}" for folder in folders for ending in (".py", ".sh"))
    file = next(filter(os.path.isfile, paths), None) if isinstance(model, str) else None
    program = start.named.get("train_script", "train.py")
    name = shlex.quote(program if isinstance(program, str) else "train.py")
    sourced = f"source {shlex.quote(str(file))} && " if file and file.suffix == ".sh" else ""
    arguments = split_pieces(start.named.get("train_args", MISSING))
    model_pieces = _model_pieces(script, file, model, start.environment)
    variables: dict[str, tuple[ShellValue, ...]] = {}
    text = _shell_text([f"{sourced}python3 {name} ", *model_pieces, " ", *arguments], variables, script)
    launch = read_command(text, variables, script, start.line, environment)
    words = tuple(_locate(launch.words, _option_lines([script, file] if file else [script]), (script, start.line)))
    return replace(launch, words=words, environment=dict(_environment(start, script)))


def _model_pieces(script: Path, file: Path | None, model: Any, environment: Mapping[str, Any]) -> tuple[Piece, ...]:
    """The quoted arguments of the model, or the array of a bash script."""
    if model is None:
        return ()
    if file and file.suffix == ".sh":
        return ("${MODEL_ARGS[@]}",)
    if file:
        arguments = model_arguments(file.parents[2] / _TOOL, model, environment)
        if isinstance(arguments, str):
            return (" ".join(shlex.quote(word) for word in arguments.split()),)
        return split_pieces(arguments)
    if isinstance(model, str):
        missing = f"no folder above {script.parent.absolute()} has scripts/models/{model}.sh (miles: .py)"
        why = f"{missing}: set SLIME_DIR or MILES_DIR to the checkout that has it"
        return (Unknown(f"MODEL_ARGS of {model}", why),)
    unknown = [piece for piece in split_pieces(model) if not isinstance(piece, str)]
    return (Unknown("MODEL_ARGS of a model", unknown[0].why if unknown else "its name is unknown"),)


def _shell_text(pieces: list[Piece], variables: dict[str, tuple[ShellValue, ...]], script: Path) -> str:
    """The shell text of these parts, with a variable for an unknown part and an array for a conditional one."""
    text = ""
    for number, piece in enumerate(pieces):
        if isinstance(piece, str):
            text += piece
            continue
        name = f"ckptkit_{len(variables)}"
        after = pieces[number + 1] if number + 1 < len(pieces) else " "
        inside = join_pieces(piece.pieces) if isinstance(piece, Conditional) else ""
        # Blanks around the part make it complete words.
        begins = not text or text[-1].isspace()
        ends = (isinstance(inside, str) and inside[-1:].isspace()) or (isinstance(after, str) and after[:1].isspace())
        if isinstance(piece, Conditional) and isinstance(inside, str) and begins and ends and not _is_special(inside):
            variables[name] = tuple(ShellValue(word, (), script, None, piece.why) for word in shlex.split(inside))
            text += f"${{{name}[@]}} "
            continue
        parts = [piece] if isinstance(piece, Unknown) else piece.pieces
        source = "".join(part if isinstance(part, str) else getattr(part, "source", "...") for part in parts)
        # A word may be any number of options, unless it is the value of the option before it.
        is_value = any(word.startswith("--") and "=" not in word for word in text.split()[-1:])
        is_word = begins and isinstance(after, str) and (after[:1].isspace() or not after)
        gap = Gap(f"{{{source}}}[@]" if is_word and not is_value else f"{{{source}}}", piece.why)
        variables[name] = (ShellValue(gap.source, (gap,), script, None, is_unsplit=True),)
        text += f"${{{name}}}"
    return text


def _is_special(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return True
    return any(sign in text for sign in "$`\\")


def _option_lines(files: Sequence[Path]) -> dict[str, tuple[Path, int]]:
    places: dict[str, tuple[Path, int]] = {}
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            for option in re.findall(r"--[A-Za-z][\w-]*", line.partition("#")[0]):
                places.setdefault(option, (file, number))
    return places


def _locate(words: Sequence[Word], lines: Mapping[str, tuple[Path, int]], start: tuple[Path, int]) -> Iterator[Word]:
    """The words at the place of their option, or at the start of the trainer."""
    place = start
    for word in words:
        if word.text.startswith("--"):
            place = lines.get(word.text.partition("=")[0], start)
        yield replace(word, file=place[0], line=place[1])


def _environment(start: _Start, script: Path) -> Iterator[tuple[str, Word]]:
    variables = start.named.get("extra_env_vars")
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if isinstance(name, str) and isinstance(value, str):
            yield name, Word(value, script, start.line)
        elif isinstance(name, str):
            why = value.why if isinstance(value, Unknown) else "a part of it is unknown"
            yield name, UnresolvedWord(name, script, start.line, why)
