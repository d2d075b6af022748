"""Reads the launch in a bash script: the trainer's words and variables, and everything that could not be resolved."""

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
from ckptkit.verify.launch.python.values import TooMuchError
from ckptkit.verify.launch.shell.expand import BRACES
from ckptkit.verify.launch.shell.parser import parse
from ckptkit.verify.launch.shell.run import follow, run_substitution
from ckptkit.verify.launch.shell.trainers import count_processes
from ckptkit.verify.launch.shell.values import Gap, Shell, ShellValue, Start, Variable, clipped
from ckptkit.verify.launch.stacks.slime import unread
from ckptkit.verify.launch.words import LaunchText, UnfollowedCall, UnresolvedWord, Word, changes_every_start

_MAX_BYTES, _MAX_PROGRAM = 1_000_000, 300_000
# Options with paths: relative to the program for `_OF_PROGRAM`, else to the working directory.
_OF_PROGRAM = frozenset({"--config-path", "-cp", "--config_path"})
_WITH_PATHS = frozenset({*PATHS, *_OF_PROGRAM, "--config", "--config-dir", "-cd"})
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(?:[./@][\w-]+)+|[+~]{1,2}[A-Za-z_]\w*")
# A variable with such a name that is not the value of an option may be any number of options.
_MANY = re.compile(r"ARGS|ARGUMENTS|OPTS|OPTIONS|FLAGS|EXTRA", re.IGNORECASE)
_RESOURCE = "--resource"  # Relax's option for the CPUs and GPUs of its roles
_NODES, _EACH, _NODE = "--actor-num-nodes", "--actor-num-gpus-per-node", "--num-gpus-per-node"


def read_script(
    script: Path | None,
    text: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LaunchText:
    """The launch in a bash script, or in `text` such as a pasted command, which is read and never run.

    `arguments` are the positional parameters of a script that uses them, else further words of the trainer.
    `environment` contains the script's initial variables. Raises CkptkitError if the script cannot be read, is not
    bash, or starts no trainer.
    """
    if text is None and script is not None:
        try:
            text = read_regular(script, _MAX_BYTES).decode(errors="replace")
        except OSError as error:
            raise CkptkitError(f"{script}: {error.strerror}", "pass the path of the launch script") from error
    place = str(script) if script else "the text"
    parameters = tuple(ShellValue(word) for word in arguments)
    shell = Shell(script, Path.cwd(), environment or {}, run_substitution, parameters, script=script)
    try:
        follow(shell, parse(text or "", place))
    except TooMuchError as error:
        return LaunchText(unresolved=(f"{place}: {error}, so ckptkit did not read its end",))
    except RecursionError:
        return LaunchText(unresolved=(f"{place}: it is nested too deeply to be read",))
    starts = list(dict.fromkeys((start.words, start.line, start.file) for start in shell.starts))
    if not starts:
        return _without_trainer(shell, place, arguments)
    if len({words for words, _, _ in starts}) > 1:
        lines = " and ".join(f"{file or 'line'}:{line}" for _, line, file in starts)
        both = f"{lines} both start a trainer: put one of the commands into a separate script"
        return LaunchText(unresolved=(both, *shell.unresolved))
    return _launch(shell, shell.starts[0], [] if shell.argument_uses else arguments)


def read_command(
    text: str, variables: Mapping[str, tuple[ShellValue, ...]], script: Path, line: int, environment: Mapping[str, str]
) -> LaunchText:
    """The launch in one command, which a program runs at `script:line` with these variables."""
    shell = Shell(script, Path.cwd(), environment, run_substitution, script=script)
    for name, values in variables.items():
        shell.variables[name] = Variable(values, array=not values or any(value.condition for value in values))
    try:
        follow(shell, parse(text, f"{script}:{line}"))
    except TooMuchError as error:
        return LaunchText(unresolved=(f"{script}:{line}: {error}",))
    if not shell.starts:
        return LaunchText(unresolved=(f"{script}:{line}: its command starts no known trainer",))
    words = tuple(replace(word, file=script, line=line) for word in shell.starts[0].words)
    return _launch(shell, replace(shell.starts[0], line=line, words=words), [])


def _without_trainer(shell: Shell, place: str, arguments: Sequence[str]) -> LaunchText:
    """The launch in a text that is only options, as pasted from a log. Raises CkptkitError for any other text."""
    if len(shell.lost) == 1 and not shell.unresolved:
        words, line, file = shell.lost[0]
        return _launch(shell, Start(words, (), {}, line, file, shell.directory), arguments)
    if shell.stopped:
        hint = "set the variables that the script requires in the environment of this command"
        raise CkptkitError(f"{place}: the script ends at {shell.stopped[-1]} before a trainer starts", hint)
    hint = "pass the script that runs `python3 train.py ...`, or paste that command into a file"
    raise CkptkitError(f"{place}: no command starts a trainer (train.py, train_async.py, pretrain_gpt.py)", hint)


def _launch(shell: Shell, start: Start, arguments: Sequence[str]) -> LaunchText:
    unresolved: dict[str, None] = dict(shell.unresolved)
    words = (*_default_config(start), *_words(start, unresolved), *(Word(text) for text in arguments))
    if "relax" in start.program.lower().replace("/", ".").split("."):
        words = (*_expand_resource(words), *words)
    environment = {name: _word(value) for name, value in start.environment.items()}
    environment |= dict(_runtime_variables(start.before, unresolved))
    for name in (QAT_FLAG, QAT_GROUP):
        if isinstance(word := environment.get(name), UnresolvedWord):
            unresolved[f"{word.place}: {name}: {word.why}"] = None
    issues = (*shell.issues, *_lost_lines(shell), *_misspelled_arrays(shell))
    ranks = count_processes(start.before)
    return LaunchText(words, environment, tuple(unresolved), issues, start.program, ranks, start.directory)


def _default_config(start: Start) -> Iterator[Word]:
    """The default of `--config` in NeMo-RL: `args.config = os.path.join(os.path.dirname(__file__), "a", "b.yaml")`."""
    program = start.program_file
    if program is None or any(value.text.partition("=")[0] == "--config" for value in start.words):
        return
    try:
        tree = ast.parse(read_regular(program, _MAX_PROGRAM).decode(errors="replace"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="config")], value=ast.Call(args=[folder, *parts]) as call):
                names = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                is_join = ast.unparse(call.func) == "os.path.join"
                is_here = ast.unparse(folder) == "os.path.dirname(__file__)"
                if is_join and is_here and names and len(names) == len(parts):
                    yield Word(f"--config={program.parent.joinpath(*names)}", start.file, start.line)
                    return


def _word(value: ShellValue) -> Word:
    if value.known:
        return Word(value.text, value.file, value.line)
    why = value.condition or "; ".join(str(gap) for gap in value.gaps)
    return UnresolvedWord(value.text, value.file, value.line, why)


def _words(start: Start, unresolved: dict[str, None]) -> Iterator[Word]:
    """The words of a trainer. Adds a line to `unresolved` for each unknown word that a check needs."""
    option, has_value = "", False
    for value in start.words:
        word = _make_absolute(_word(value), "" if has_value else option, start)
        name, equals, _ = value.text.partition("=")
        if name.startswith("--"):
            option, has_value = "" if equals or name in SWITCH_NAMES else name, False
            owner = name
        elif has_value and _SETTING.fullmatch(name) and equals:
            # A Hydra override after the value of an option.
            if isinstance(word, UnresolvedWord):
                unresolved[f"{word.place}: {word.text}: {word.why}"] = None
            yield word
            continue
        else:
            owner, has_value = option, True
        if owner == "--load" and not value.condition and any(map(_is_new, value.gaps)):
            # A directory with the time of the start in its name: it is a new one.
            word = Word(word.text, word.file, word.line)
        if isinstance(word, UnresolvedWord):
            anything = not owner or _may_be_options(value, name)
            if anything or _is_needed(owner):
                prefix = f"{owner} " if owner and not anything and owner != name else ""
                unresolved[f"{word.place}: {prefix}{clipped(value.text)}: {clipped(word.why)}"] = None
            word = replace(word, anything=anything)
        yield word


def _is_new(gap: Gap) -> bool:
    """Whether a part of a name is different at every start."""
    return changes_every_start(gap.source) or (isinstance(gap.why, UnfollowedCall) and changes_every_start(gap.why))


def _is_needed(option: str) -> bool:
    """Whether a check needs the value of an option."""
    is_read = option in OPTIONS or bool(unread([option, "1"], frozenset()))
    return option == _RESOURCE or (is_read and option != "--save")


def _make_absolute(word: Word, option: str, start: Start) -> Word:
    """Makes a path absolute if it is relative to a directory other than the current one."""
    here = Path.cwd()
    name, equals, value = word.text.partition("=")
    owner = name if equals and name in _WITH_PATHS else option if option in _WITH_PATHS else ""
    if not owner or isinstance(word, UnresolvedWord):
        return word
    base = start.directory
    if owner in _OF_PROGRAM:
        # Hydra looks for it next to the program; a module's directory is where it is installed.
        base = start.program_file.parent if start.program_file else here
    text = value if owner == name else word.text
    if base == here or text.startswith("--") or text.isdecimal() or Path(text).is_absolute():
        return word
    if base is None:
        return UnresolvedWord(word.text, word.file, word.line, "relative to an unknown directory")
    return replace(word, text=f"{name}={base / text}" if owner == name else str(base / text))


def _may_be_options(value: ShellValue, name: str) -> bool:
    """Whether an unknown word may be several words, with options among them; `name` is the text before its `=`."""
    if name.startswith("--"):
        return any(gap.source in name or gap.why == BRACES for gap in value.gaps)
    if len(value.gaps) != 1 or value.text != value.gaps[0].source:
        return False
    if value.text.startswith("{"):
        # A Python expression: the launcher's reader marks it if it is not the value of an option.
        return value.text.endswith("[@]")
    return "[@]" in value.text or "$@" in value.text or _MANY.search(value.text) is not None


def _runtime_variables(before: Sequence[ShellValue], unresolved: dict[str, None]) -> Iterator[tuple[str, Word]]:
    for number, value in enumerate(before):
        name, equals, content = value.text.partition("=")
        if name != "--runtime-env-json":
            continue
        source = value if equals else before[number + 1] if number + 1 < len(before) else ShellValue("")
        try:
            variables = json.loads(content if equals else source.text).get("env_vars") or {}
            texts = {str(key): str(variable) for key, variable in variables.items()}
        except (ValueError, AttributeError, RecursionError):
            place = f"{source.file}:{source.line}" if source.file else "the text"
            unresolved[f"{place}: --runtime-env-json: its text is unknown, or is not JSON"] = None
            continue
        for key, text in texts.items():
            gaps = tuple(gap for gap in source.gaps if gap.source in text)[:1]
            yield key, _word(ShellValue(text, gaps, source.file, source.line))


def _lost_lines(shell: Shell) -> Iterator[Issue]:
    """Commands that begin with an option: the line before them lacks its `\\`."""
    if not shell.starts:
        return
    for words, line, file in shell.lost:
        options = [word.text for word in words if word.text.startswith("--")] or [words[0].text]
        more = f" and {len(options) - 3} more" if options[3:] else ""
        expected = "a `\\` as the last character of every line of the command except the last line"
        lost = f"{', '.join(options[:3])}{more} {'are' if options[1:] else 'is'} lost"
        begins = f"{file or 'line'}:{line} begins with {words[0].text}, but the command ends above it"
        hint = "end the line above with `\\`, and put no comment between the lines"
        yield Issue(expected, f"{begins}, so {lost}", hint, file=file)


def _misspelled_arrays(shell: Shell) -> Iterator[Issue]:
    """Unset arrays, which bash expands to no words, with a name one letter away from the name of a set one."""
    arrays = [name for name, variable in shell.variables.items() if variable.array and variable.values]
    for name, file in shell.empty.items():
        if len(name) > 3 and (meant := nearest(name, arrays, 1)) is not None:
            expected = f"the name of an array that the script sets, such as ${{{meant}[@]}}"
            actual = f"the script never sets ${{{name}[@]}}, so its options do not reach the trainer"
            yield Issue(expected, actual, f"correct the name to {meant}", file=file)


def _expand_resource(words: Sequence[Word]) -> Iterator[Word]:
    """The slime options for `--resource`, to be put before those of the launch, which override them.

    The actor's GPUs fill nodes of `--num-gpus-per-node`, unless the launch has the actor's own options. Source: Relax
    `backends/megatron/arguments.py` (_derive_cluster_args_from_resource), as of 2026-09. Raises CkptkitError.
    """
    options = options_of(words)
    option = last(options, _RESOURCE)
    if option is None or (word := option.value) is None or isinstance(word, UnresolvedWord):
        return
    try:
        gpus = {str(role): int(both[1]) for role, both in json.loads(word.text).items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        hint = 'write it as {"actor": [1, 8], "rollout": [1, 8]}: CPUs and GPUs of every role'
        raise CkptkitError(f"{word.place}: {_RESOURCE} {word.text[:80]} is not JSON of roles", hint) from error
    expanded: dict[str, int] = {}
    if gpus.get("actor", 0) > 0 and _number(options, _EACH, 8) == 8 and _number(options, _NODES, 1) == 1:
        each = min(_number(options, _NODE, 8) or 8, gpus["actor"])
        expanded |= {_EACH: each, _NODES: max(1, gpus["actor"] // each)}
    if gpus.get("rollout", 0) > 0:
        expanded["--rollout-num-gpus"] = gpus["rollout"]
    for pair in expanded.items():
        yield from (Word(str(text), word.file, word.line) for text in pair)


def _number(options: Sequence[Option], name: str, default: int) -> int | None:
    option = last(options, name)
    if option is None or option.value is None:
        return default
    return int(option.value.text) if option.value.text.isdecimal() and len(option.value.text) < 10 else None
