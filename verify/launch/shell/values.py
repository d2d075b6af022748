"""The state of a shell at a point of a script: variables, unknown values with their reasons, limits on its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from ckptkit.core.isolation import HIDDEN, is_secret
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.python.values import MAX_CHARACTERS, TooMuchError
from ckptkit.verify.launch.shell.syntax import Node, Substitution

# A script that needs more is not read to its end.
MAX_STEPS = 20_000
MAX_WORDS = 20_000
_SHOWN = 300  # of a word, for people
_CHARACTERS_A_STEP = 500  # so that no more than 10 MB are taken apart
MAX_DEPTH = 25


def clipped(text: str) -> str:
    """The beginning of a text, for people."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def join_texts(texts: Iterable[str], separator: str = "") -> str:
    """Texts with separators. Raises TooMuchError past `MAX_CHARACTERS`, before they are joined."""
    parts = list(texts)
    if sum(map(len, parts)) + len(separator) * len(parts) > MAX_CHARACTERS:
        raise TooMuchError(f"a text has more than {MAX_CHARACTERS} characters")
    return separator.join(parts)


@dataclass(frozen=True)
class Gap:
    """An unknown part of a text: its source, and the reason."""

    source: str
    why: str

    def __str__(self) -> str:
        return f"{clipped(self.source)} ({self.why})"


@dataclass(frozen=True)
class ShellValue:
    """A text with the source of each gap in the place of its value, and the place where it is written."""

    text: str
    gaps: tuple[Gap, ...] = ()
    file: Path | None = None
    line: int | None = None
    condition: str = ""  # the undecidable condition on which the value exists
    is_unsplit: bool = False  # never split at blanks

    @property
    def known(self) -> bool:
        """Whether the value exists for certain and has no gap."""
        return not self.gaps and not self.condition


def unknown_value(source: str, why: str, file: Path | None = None, line: int | None = None) -> ShellValue:
    """A value that is one gap."""
    return ShellValue(source, (Gap(source, why),), file, line)


@dataclass(frozen=True)
class Variable:
    """A scalar (one value) or an array."""

    values: tuple[ShellValue, ...]
    array: bool = False
    exported: bool = False


@dataclass(frozen=True)
class Start:
    """A command that starts a trainer: the trainer's words, the words before them, and its environment."""

    words: tuple[ShellValue, ...]
    before: tuple[ShellValue, ...]
    environment: Mapping[str, ShellValue]
    line: int
    file: Path | None
    directory: Path | None  # None after a `cd` that could not be followed
    program: str = ""  # the word that names the trainer

    @property
    def program_file(self) -> Path | None:
        """The file of the trainer, or None if it is a module or its directory is unknown."""
        return self.directory / self.program if self.directory and self.program.endswith(".py") else None


@dataclass
class Shell:
    """The state of a simulated shell. A branch shares `unresolved` and the fields after it up to `argument_uses`."""

    file: Path | None
    directory: Path | None  # None after a `cd` that could not be followed
    environment: Mapping[str, str]
    run: Callable[[Shell, Substitution], ShellValue]  # gives the output of the commands in `$(...)`
    arguments: tuple[ShellValue, ...] = ()
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Node | None] = field(default_factory=dict)  # None if an unknown condition selects the body
    unresolved: dict[str, None] = field(default_factory=dict)  # a line for everything that could not be followed
    starts: list[Start] = field(default_factory=list)
    lost: list[tuple[tuple[ShellValue, ...], int, Path | None]] = field(default_factory=list)  # begin with an option
    empty: dict[str, str] = field(default_factory=dict)  # arrays that are expanded and never set, with their file
    stopped: list[str] = field(default_factory=list)  # places where the script ends itself
    locals: list[dict[str, Variable | None]] = field(default_factory=list)  # for functions to restore
    special: dict[str, str] = field(default_factory=dict)  # variables with attributes, by the declaration
    written: set[str] = field(default_factory=set)  # names of files that commands write
    issues: list[Issue] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [0])
    argument_uses: list[int] = field(default_factory=list)
    output: list[ShellValue] | None = None
    depth: int = 0
    result: bool | None = True  # whether the last command succeeded
    substitution: bool | None = True  # whether the last `$(...)` succeeded
    errexit: bool | None = False  # whether a failing command ends the script
    pipefail: bool | None = False  # whether a pipeline fails with any of its commands
    guarded: int = 0  # conditions around a command, in which failures end nothing
    callers: int = 0  # functions and sourced files around a command
    loops: int = 0
    script: Path | None = None  # the file that was started, which `$0` names in every file it sources

    def step(self, characters: int = 0) -> None:
        """Counts one command, and more for a long text. Raises TooMuchError after `MAX_STEPS`."""
        self.steps[0] += 1 + characters // _CHARACTERS_A_STEP
        if self.steps[0] > MAX_STEPS:
            raise TooMuchError(f"it runs more than {MAX_STEPS} commands before a trainer starts")

    def deeper(self) -> None:
        """Counts one more nested function, file or command. Raises TooMuchError after `MAX_DEPTH`."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooMuchError(f"more than {MAX_DEPTH} functions, files and commands are nested")

    @property
    def exported(self) -> dict[str, ShellValue]:
        """The environment of a command."""
        return {name: one.values[0] for name, one in self.variables.items() if one.exported and one.values}

    def branch(self) -> Shell:
        """A copy with separate variables, functions and directory."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))

    def take_over(self, other: Shell) -> None:
        """Makes a branch's state this one's."""
        for name in ("variables", "functions", "directory", "arguments", "errexit", "result", "pipefail"):
            setattr(self, name, getattr(other, name))

    def place(self, line: int) -> str:
        """`run.sh:12`."""
        return f"{self.file}:{line}" if self.file else f"line {line}"

    def report(self, line: int, message: str) -> None:
        self.unresolved[f"{self.place(line)}: {message}"] = None

    def assign(self, name: str, value: ShellValue) -> None:
        """Sets a scalar, which stays exported if it was."""
        if len(value.text) > MAX_CHARACTERS:
            raise TooMuchError(f"${name} has more than {MAX_CHARACTERS} characters")
        before = self.variables.get(name)
        if name in self.special and not value.gaps:  # `declare -i` and other attributes change the value
            source = f"${{{name}}}"
            value = replace(value, text=source, gaps=(Gap(source, self.special[name]),))
        self.variables[name] = Variable((value,), False, bool(before and before.exported))

    def assign_array(self, name: str, values: tuple[ShellValue, ...]) -> None:
        if len(values) > MAX_WORDS:
            raise TooMuchError(f"${name} has more than {MAX_WORDS} words")
        if name in self.special:
            self.assign(name, ShellValue(""))
        else:
            self.variables[name] = Variable(values, True)

    def drop(self, name: str) -> None:
        """Unsets a variable, even one of the environment."""
        self.variables.pop(name, None)
        if name in self.environment:
            self.variables[name] = Variable((), array=True)

    def restore(self, variables: Mapping[str, Variable | None]) -> None:
        """Sets these variables again, or unsets those with None."""
        for name, variable in variables.items():
            if variable is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = variable

    def forget(self, name: str, why: str) -> None:
        """Makes a variable unknown."""
        self.assign(name, unknown_value(f"${{{name}}}", why, self.file))

    def lookup(self, name: str) -> Variable | None:
        """A variable of the script or its environment, or None if both lack it."""
        if name in self.variables or name not in self.environment:
            return self.variables.get(name)
        value = self.environment[name]
        is_hidden = is_secret(name, value)
        return Variable((unknown_value(f"${{{name}}}", HIDDEN) if is_hidden else ShellValue(value),), exported=True)


def merge_shells(first: Shell, second: Shell, why: str) -> dict[str, Variable]:
    """The variables after one of two branches: different scalars are unknown, different elements get a condition."""
    variables: dict[str, Variable] = {}
    for name in first.variables.keys() | second.variables.keys():
        left, right = first.variables.get(name), second.variables.get(name)
        if left is not None and right is not None and (left == right or _is_same_text(left, right)):
            variables[name] = left
        elif (left is None or left.array) and (right is None or right.array):
            variables[name] = Variable(_merge_arrays(left, right, why), array=True)
        else:
            one = left or right
            place = one.values[0] if one and one.values else ShellValue("")
            exported = any(side is not None and side.exported for side in (left, right))
            variables[name] = Variable((unknown_value(f"${{{name}}}", why, place.file, place.line),), exported=exported)
    return variables


def _is_same_text(left: Variable, right: Variable) -> bool:
    """Whether both are one known text, which may be written in two places."""
    is_text = all(not side.array and side.values and side.values[0].known for side in (left, right))
    return is_text and left.exported == right.exported and left.values[0].text == right.values[0].text


def _merge_arrays(left: Variable | None, right: Variable | None, why: str) -> tuple[ShellValue, ...]:
    first, second = left.values if left else (), right.values if right else ()
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
    different = (*first[same:], *second[same:])
    return (*first[:same], *(replace(value, condition=value.condition or why) for value in different))
