"""Reads the launch that a bash script is: the words of its trainer, its variables, and what could not be told."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.regular import read_regular
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.arguments import QAT_FLAG, QAT_GROUP
from ckptkit.verify.launch.options.argv import Option, last, options_of
from ckptkit.verify.launch.options.names import nearest
from ckptkit.verify.launch.options.tables import OPTIONS, PATHS, SWITCH_NAMES
from ckptkit.verify.launch.shell.expand import BRACES
from ckptkit.verify.launch.shell.parser import parse
from ckptkit.verify.launch.shell.run import follow, substituted
from ckptkit.verify.launch.shell.trainers import started_processes
from ckptkit.verify.launch.shell.values import Gap, Shell, ShellValue, Start, TooMuchError, Variable, clipped
from ckptkit.verify.launch.stacks.slime import unread
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord, Word, changes_every_start

_MAX_BYTES, _MAX_PROGRAM = 1_000_000, 300_000
# Options with paths: those of `_BESIDE` are relative to the program, the others to where it is started.
_BESIDE = frozenset({"--config-path", "-cp", "--config_path"})
_PLACED = frozenset({*PATHS, *_BESIDE, "--config", "--config-dir", "-cd"})
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(?:[./@][\w-]+)+|[+~]{1,2}[A-Za-z_]\w*")
# A variable of this name that is given without an option may be any number of options.
_MANY = re.compile(r"ARGS|ARGUMENTS|OPTS|OPTIONS|FLAGS|EXTRA", re.IGNORECASE)
# Relax's option for the GPUs of its roles: `[CPUs, GPUs]` of each.
_RESOURCE = "--resource"
_NODES, _EACH, _NODE = "--actor-num-nodes", "--actor-num-gpus-per-node", "--num-gpus-per-node"


def read_script(
    script: Path | None,
    text: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LaunchText:
    """What a bash script, or a pasted command, gives to its trainer. The script is read and never run.

    `text` is used where there is no file. `arguments` are the positional parameters of a script that uses them, else
    they come behind its words; `environment` holds the variables that it would start with. Raises CkptkitError where
    it cannot be read, is no bash, or starts no trainer.
    """
    text = _text(script) if text is None and script is not None else text or ""
    place = str(script) if script else "the text"
    given = tuple(ShellValue(word) for word in arguments)
    shell = Shell(script, Path.cwd(), environment or {}, substituted, given, script=script)
    try:
        follow(shell, parse(text, place))
    except TooMuchError as error:
        return LaunchText(unresolved=(f"{place}: {error}, so it was not read to its end",))
    except RecursionError:
        return LaunchText(unresolved=(f"{place}: it is nested too deeply to be read",))
    starts = list(dict.fromkeys((start.words, start.line, start.file) for start in shell.starts))
    if not starts:
        return _without_trainer(shell, place, arguments)
    if len({words for words, _, _ in starts}) > 1:
        lines = " and ".join(f"{file or 'line'}:{line}" for _, line, file in starts)
        more = f"{lines} both start a trainer: give the command that is meant as a script of its own"
        return LaunchText(unresolved=(more, *shell.unresolved))
    return _launch(shell, shell.starts[0], [] if shell.argument_uses else arguments)


def read_command(
    text: str, variables: Mapping[str, tuple[ShellValue, ...]], script: Path, line: int, environment: Mapping[str, str]
) -> LaunchText:
    """What one command gives to its trainer, which a program at `script:line` would run with these variables."""
    shell = Shell(script, Path.cwd(), environment, substituted, script=script)
    for name, values in variables.items():
        shell.variables[name] = Variable(values, array=not values or any(value.maybe for value in values))
    try:
        follow(shell, parse(text, f"{script}:{line}"))
    except TooMuchError as error:
        return LaunchText(unresolved=(f"{script}:{line}: {error}",))
    if not shell.starts:
        return LaunchText(unresolved=(f"{script}:{line}: its command starts no trainer that is known",))
    start = replace(shell.starts[0], line=line)
    return _launch(shell, replace(start, words=tuple(replace(one, file=script, line=line) for one in start.words)), [])


def _text(script: Path) -> str:
    try:
        return read_regular(script, _MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise CkptkitError(f"{script}: {error.strerror}", "give the path of the launch script itself") from error


def _without_trainer(shell: Shell, place: str, arguments: Sequence[str]) -> LaunchText:
    """A text that is options and nothing else, as they are pasted from a log; anything else starts no trainer."""
    if len(shell.lost) == 1 and not shell.unresolved:
        words, line, file = shell.lost[0]
        return _launch(shell, Start(words, (), {}, line, file, shell.directory), arguments)
    if shell.stopped:
        message = f"{place}: it ends at {shell.stopped[-1]} before a trainer starts"
        hint = "set the variables that it asks for in the environment of this command, as for the job"
        raise CkptkitError(message, hint)
    hint = "give the script that runs `python3 train.py ...`, or paste that command into a file"
    raise CkptkitError(f"{place}: no command starts a trainer (train.py, train_async.py, pretrain_gpt.py)", hint)


def _launch(shell: Shell, start: Start, arguments: Sequence[str]) -> LaunchText:
    unresolved: dict[str, None] = dict(shell.unresolved)
    words = (*_default(start), *_words(start, unresolved), *(Word(text) for text in arguments))
    if "relax" in start.program.lower().replace("/", ".").split("."):
        words = (*_options_of_resource(words), *words)
    environment = {name: _word(value) for name, value in start.environment.items()}
    environment |= dict(_runtime(start.before, unresolved))
    for name in (QAT_FLAG, QAT_GROUP):
        if isinstance(word := environment.get(name), UnresolvedWord):
            unresolved[f"{word.place}: {name}: {word.why}"] = None
    wrong = (*shell.issues, *_lost(shell), *_misspelled(shell))
    ranks = started_processes(start.before)
    return LaunchText(words, environment, tuple(unresolved), wrong, start.program, ranks, start.directory)


def _default(start: Start) -> Iterator[Word]:
    """The file of settings that the program itself names, where the launch names none."""
    named = any(value.text.partition("=")[0] == "--config" for value in start.words)
    if start.program_file and not named and (path := _default_config(start.program_file)):
        yield Word(f"--config={path}", start.file, start.line)


def _default_config(program: Path) -> Path | None:
    """The file that a program of NeMo-RL takes: `args.config = os.path.join(os.path.dirname(__file__), "a", "b.yaml")`.

    None where its file is not there, or says nothing of the kind.
    """
    try:
        tree = ast.parse(read_regular(program, _MAX_PROGRAM).decode(errors="replace"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="config")], value=ast.Call(args=[folder, *parts]) as call):
                names = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                known = ast.unparse(call.func) == "os.path.join" and ast.unparse(folder) == "os.path.dirname(__file__)"
                if known and names and len(names) == len(parts):
                    return program.parent.joinpath(*names)
    return None


def _word(value: ShellValue) -> Word:
    if value.known:
        return Word(value.text, value.file, value.line)
    why = value.maybe or "; ".join(str(gap) for gap in value.gaps)
    return UnresolvedWord(value.text, value.file, value.line, why)


def _words(start: Start, unresolved: dict[str, None]) -> Iterator[Word]:
    """The words of a trainer; `unresolved` gets a line for each that is not known and that something depends on."""
    option, taken = "", False
    for value in start.words:
        word = _placed(_word(value), "" if taken else option, start)
        name, equals, _ = value.text.partition("=")
        if name.startswith("--"):
            option, taken = "" if equals or name in SWITCH_NAMES else name, False
            about = name
        elif taken and _SETTING.fullmatch(name) and equals:
            # An override of a setting, as Hydra has them, behind the value of an option.
            if isinstance(word, UnresolvedWord):
                unresolved[f"{word.place}: {word.text}: {word.why}"] = None
            yield word
            continue
        else:
            about, taken = option, True
        if about == "--load" and not value.maybe and any(map(_is_new, value.gaps)):
            # A directory with the time of the start in its name: it is a new one.
            word = Word(word.text, word.file, word.line)
        if isinstance(word, UnresolvedWord):
            anything = not about or _may_be_options(value, name)
            if anything or _matters(about):
                prefix = f"{about} " if about and not anything and about != name else ""
                unresolved[f"{word.place}: {prefix}{clipped(value.text)}: {clipped(word.why)}"] = None
            word = UnresolvedWord(word.text, word.file, word.line, word.why, anything)
        yield word


def _is_new(gap: Gap) -> bool:
    """Whether a part of a name is another one at every start."""
    called = gap.why.startswith("the call of ") and changes_every_start(gap.why)
    return called or changes_every_start(gap.source)


def _matters(option: str) -> bool:
    """Whether anything that is looked at depends on the value of an option."""
    if option in (_RESOURCE, "--save"):
        return option == _RESOURCE
    return option in OPTIONS or bool(unread([option, "1"], frozenset()))


def _placed(word: Word, option: str, start: Start) -> Word:
    """A word; a path that is relative to another directory than this one's becomes absolute."""
    here = Path.cwd()
    name, equals, value = word.text.partition("=")
    about = name if equals and name in _PLACED else option if option in _PLACED else ""
    if not about or isinstance(word, UnresolvedWord):
        return word
    base = start.directory
    if about in _BESIDE:
        # Hydra looks for it beside the program; that of a module is where it is installed.
        base = start.program_file.parent if start.program_file else here
    text = value if about == name else word.text
    if base == here or text.startswith("--") or text.isdecimal() or Path(text).is_absolute():
        return word
    if base is None:
        return UnresolvedWord(word.text, word.file, word.line, "relative to a directory that is not known")
    text = str(base / text)
    return Word(f"{name}={text}" if about == name else text, word.file, word.line)


def _may_be_options(value: ShellValue, name: str) -> bool:
    """Whether a word that is not known may be several, options among them; `name` is what stands before its `=`."""
    if name.startswith("--"):
        return any(gap.source in name or gap.why == BRACES for gap in value.gaps)
    if len(value.gaps) != 1 or value.text != value.gaps[0].source:
        return False
    if value.text.startswith("{"):
        # An expression of Python, of which the launcher's reader says whether it is the value of an option.
        return value.text.endswith("[@]")
    return "[@]" in value.text or "$@" in value.text or _MANY.search(value.text) is not None


def _runtime(before: Sequence[ShellValue], unresolved: dict[str, None]) -> Iterator[tuple[str, Word]]:
    """The variables that `ray job submit --runtime-env-json` gives to the trainer."""
    for number, value in enumerate(before):
        name, equals, given = value.text.partition("=")
        if name != "--runtime-env-json":
            continue
        text = value if equals else before[number + 1] if number + 1 < len(before) else ShellValue("")
        content = given if equals else text.text
        try:
            variables = json.loads(content).get("env_vars") or {}
            pairs = [(str(key), str(variable)) for key, variable in variables.items()]
        except (ValueError, AttributeError, RecursionError):
            place = f"{text.file}:{text.line}" if text.file else "the text"
            unresolved[f"{place}: --runtime-env-json: its text is not known, or is not JSON"] = None
            continue
        for key, variable in pairs:
            gap = next((gap for gap in text.gaps if gap.source in variable), None)
            known = Word(variable, text.file, text.line)
            yield key, UnresolvedWord(variable, text.file, text.line, str(gap)) if gap else known


def _lost(shell: Shell) -> Iterator[Issue]:
    """Commands that begin with an option: the line before them lacks its `\\`."""
    if not shell.starts:
        return
    for words, line, file in shell.lost:
        options = [word.text for word in words if word.text.startswith("--")] or [words[0].text]
        more = f" and {len(options) - 3} more" if options[3:] else ""
        yield Issue(
            "a `\\` at the end of every line of the command but its last, with no blank or comment behind it",
            f"{file or 'line'}:{line} begins with {words[0].text}: the command has ended before it, so "
            f"{', '.join(options[:3])}{more} {'are' if options[1:] else 'is'} lost",
            "end the line above with `\\`, without a comment in between",
            file=file,
        )


def _misspelled(shell: Shell) -> Iterator[Issue]:
    """Arrays that are set nowhere one is that differs in a letter: bash expands them to nothing."""
    for name, file in shell.empty.items():
        meant = nearest(name, (one for one, value in shell.variables.items() if value.array and value.values), 1)
        if meant is not None and len(name) > 3:
            yield Issue(
                f"an array that is set, such as ${{{meant}[@]}}",
                f"${{{name}[@]}} is set nowhere, so none of its words reach the trainer",
                f"correct the name: {meant}",
                file=file,
            )


def _options_of_resource(words: Sequence[Word]) -> Iterator[Word]:
    """The options of slime that `--resource` stands for; they come before those of the launch, which count more.

    The actor's GPUs make nodes of `--num-gpus-per-node`, unless a launch gives the actor's own options. Source: Relax
    `backends/megatron/arguments.py` (_derive_cluster_args_from_resource), as of 2026-09.
    Raises CkptkitError where its text is not JSON of this form.
    """
    options = options_of(words)
    word = _value(options, _RESOURCE)
    if word is None or isinstance(word, UnresolvedWord):
        return
    try:
        gpus = {str(role): int(both[1]) for role, both in json.loads(word.text).items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        hint = 'write it as {"actor": [1, 8], "rollout": [1, 8]}: CPUs and GPUs of every role'
        raise CkptkitError(f"{word.place}: {_RESOURCE} {word.text[:80]} is not JSON of roles", hint) from error
    found: dict[str, int] = {}
    given = [_number(options, name, default) for name, default in ((_EACH, 8), (_NODES, 1))]
    if gpus.get("actor", 0) > 0 and given == [8, 1]:
        each = min(_number(options, _NODE, 8) or 8, gpus["actor"])
        found |= {_EACH: each, _NODES: max(1, gpus["actor"] // each)}
    if gpus.get("rollout", 0) > 0:
        found["--rollout-num-gpus"] = gpus["rollout"]
    for pair in found.items():
        yield from (Word(str(text), word.file, word.line) for text in pair)


def _value(options: Sequence[Option], name: str) -> Word | None:
    option = last(options, name)
    return option.value if option else None


def _number(options: Sequence[Option], name: str, default: int) -> int | None:
    word = _value(options, name)
    if word is None:
        return default
    return int(word.text) if word.text.isdecimal() and len(word.text) < 10 else None
