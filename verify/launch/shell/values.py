"""What a shell knows at a point of a script: variables, what could not be told of them, and limits on its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.core.isolation import HIDDEN, is_secret
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.shell.syntax import Node, Substitution

# A script that needs more is not read to its end.
MAX_STEPS = 20_000
MAX_WORDS = 20_000
MAX_CHARACTERS = 1_000_000
_SHOWN = 300  # of a word, for people
_CHARACTERS_A_STEP = 500  # so that no more than 10 MB are taken apart
MAX_DEPTH = 25


class TooMuchError(Exception):
    """A script does more than a launch does: the limit that it reached."""


def clipped(text: str) -> str:
    """The beginning of a text, for people."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def together(texts: Iterable[str], between: str = "") -> str:
    """Texts with `between` in between. Raises TooMuchError past `MAX_CHARACTERS`, before they are joined."""
    listed = list(texts)
    if sum(map(len, listed)) + len(between) * len(listed) > MAX_CHARACTERS:
        raise TooMuchError(f"a text has more than {MAX_CHARACTERS} characters")
    return between.join(listed)


@dataclass(frozen=True)
class Gap:
    """Something whose value is not known: how it is written, and why."""

    source: str
    why: str

    def __str__(self) -> str:
        return f"{clipped(self.source)} ({self.why})"


@dataclass(frozen=True)
class ShellValue:
    """A text, with the source of every gap where its value would stand; and where it is written.

    `maybe`: it is only there if a condition holds that cannot be decided. `whole`: it is never split at blanks.
    """

    text: str
    gaps: tuple[Gap, ...] = ()
    file: Path | None = None
    line: int | None = None
    maybe: str = ""
    whole: bool = False

    @property
    def known(self) -> bool:
        """Whether it is certain to be there, as it is."""
        return not self.gaps and not self.maybe


@dataclass(frozen=True)
class Variable:
    """A scalar (one value) or an array."""

    values: tuple[ShellValue, ...]
    array: bool = False
    exported: bool = False


@dataclass(frozen=True)
class Start:
    """A command that starts a trainer: its words, those before them, and the variables that it sees.

    `directory`: where it is started; None where a `cd` could not be followed. `program`: the word that names it.
    """

    words: tuple[ShellValue, ...]
    before: tuple[ShellValue, ...]
    environment: Mapping[str, ShellValue]
    line: int
    file: Path | None
    directory: Path | None
    program: str = ""

    @property
    def program_file(self) -> Path | None:
        """The file of the trainer; None where it is a module, or where it lies is not known."""
        return self.directory / self.program if self.directory and self.program.endswith(".py") else None


@dataclass
class Shell:
    """The state of a shell that is only imagined.

    `functions`: their bodies; None where one of several is meant, and nobody knows which.
    `directory` is None where a `cd` could not be followed. `unresolved` has a line for everything that may have
    changed anything and could not be followed, `empty` the arrays that are expanded and set nowhere, `stopped` the
    places where the script ends itself, `locals` what the functions that are being called must restore, `special` the
    variables that an assignment sets to something else, by what declared them so, `written` the names of the files that
    commands have written. These, `starts`, `lost`, `issues`, `steps` and `argument_uses` are shared by all branches.

    `result`: whether the last command succeeded, `substitution` the last `$(...)`. `errexit`: whether a command that
    fails ends the script, unless it is `guarded` by a condition; `pipefail`: whether any command of a pipeline does so.
    `callers` and `loops` count the functions, sourced
    files and loops around a command. `script`: the file that was started, which `$0` names in every file it sources.
    `run` gives the output of the commands in `$(...)`.
    """

    file: Path | None
    directory: Path | None
    environment: Mapping[str, str]
    run: Callable[[Shell, Substitution], ShellValue]
    arguments: tuple[ShellValue, ...] = ()
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Node | None] = field(default_factory=dict)
    unresolved: dict[str, None] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    lost: list[tuple[tuple[ShellValue, ...], int, Path | None]] = field(default_factory=list)
    output: list[ShellValue] | None = None
    steps: list[int] = field(default_factory=lambda: [0])
    depth: int = 0
    argument_uses: list[int] = field(default_factory=list)
    empty: dict[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    locals: list[dict[str, Variable | None]] = field(default_factory=list)
    special: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    issues: list[Issue] = field(default_factory=list)
    result: bool | None = True
    substitution: bool | None = True
    errexit: bool | None = False
    pipefail: bool | None = False
    guarded: int = 0
    callers: int = 0
    loops: int = 0
    script: Path | None = None

    def step(self, characters: int = 0) -> None:
        """Counts one command, and more for a text of many characters. Raises TooMuchError after `MAX_STEPS`."""
        self.steps[0] += 1 + characters // _CHARACTERS_A_STEP
        if self.steps[0] > MAX_STEPS:
            raise TooMuchError(f"it runs more than {MAX_STEPS} commands before a trainer starts")

    def deeper(self) -> None:
        """Counts one more function, file or command inside of others. Raises TooMuchError after `MAX_DEPTH`."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooMuchError(f"more than {MAX_DEPTH} functions, files and commands stand inside one another")

    @property
    def exported(self) -> dict[str, ShellValue]:
        """The variables that a command sees."""
        return {name: one.values[0] for name, one in self.variables.items() if one.exported and one.values}

    def branch(self) -> Shell:
        """A copy whose variables, functions and directory change apart from this one's."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))

    def take_over(self, other: Shell) -> None:
        """Makes a branch's state this one's."""
        self.variables, self.functions, self.directory = other.variables, other.functions, other.directory
        self.arguments, self.errexit, self.result = other.arguments, other.errexit, other.result
        self.pipefail = other.pipefail

    def place(self, line: int) -> str:
        """`run.sh:12`."""
        return f"{self.file}:{line}" if self.file else f"line {line}"

    def assign(self, name: str, value: ShellValue) -> None:
        """Sets a scalar, which stays exported if it was."""
        if len(value.text) > MAX_CHARACTERS:
            raise TooMuchError(f"${name} has more than {MAX_CHARACTERS} characters")
        before = self.variables.get(name)
        if name in self.special and not value.gaps:  # another value than the given one, by `declare -i` and its like
            source = f"${{{name}}}"
            value = replace(value, text=source, gaps=(Gap(source, self.special[name]),))
        self.variables[name] = Variable((value,), False, bool(before and before.exported))

    def assign_array(self, name: str, values: tuple[ShellValue, ...]) -> None:
        """Sets an array."""
        if len(values) > MAX_WORDS:
            raise TooMuchError(f"${name} has more than {MAX_WORDS} words")
        if name in self.special:
            self.assign(name, ShellValue(""))
        else:
            self.variables[name] = Variable(values, True)

    def drop(self, name: str) -> None:
        """Makes a variable one that is not set, whatever the environment says."""
        self.variables.pop(name, None)
        if name in self.environment:
            self.variables[name] = Variable((), array=True)

    def restore(self, name: str, variable: Variable | None) -> None:
        """Makes a variable what it was; None: not set."""
        if variable is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = variable

    def forget(self, name: str, why: str) -> None:
        """Makes a variable unknown."""
        source = f"${{{name}}}"
        self.assign(name, ShellValue(source, (Gap(source, why),), self.file))

    def lookup(self, name: str) -> Variable | None:
        """A variable of the script, or of the environment that it starts in; None where it is set in neither."""
        if name in self.variables:
            return self.variables[name]
        if name in self.environment:
            source, value = f"${{{name}}}", self.environment[name]
            known = ShellValue(source, (Gap(source, HIDDEN),)) if is_secret(name, value) else ShellValue(value)
            return Variable((known,), exported=True)
        return None


def either_shell(one: Shell, other: Shell, why: str) -> dict[str, Variable]:
    """The variables after one of two branches, where nobody knows which: what differs is unknown.

    Arrays keep what they have in common at the start; what only one branch adds may be there.
    """
    variables: dict[str, Variable] = {}
    for name in one.variables.keys() | other.variables.keys():
        left, right = one.variables.get(name), other.variables.get(name)
        if left is not None and right is not None and (left == right or _same(left, right)):
            variables[name] = left
        elif (left is None or left.array) and (right is None or right.array):
            variables[name] = Variable(_joined(left, right, why), array=True)
        else:
            source = f"${{{name}}}"
            known = left or right
            place = known.values[0] if known and known.values else ShellValue("")
            exported = any(side is not None and side.exported for side in (left, right))
            gap = ShellValue(source, (Gap(source, why),), place.file, place.line)
            variables[name] = Variable((gap,), exported=exported)
    return variables


def _same(left: Variable, right: Variable) -> bool:
    """Whether both are one known text, be it written in two places."""
    if left.array or right.array or left.exported != right.exported or not (left.values and right.values):
        return False
    here, there = left.values[0], right.values[0]
    return here.known and there.known and here.text == there.text


def _joined(left: Variable | None, right: Variable | None, why: str) -> tuple[ShellValue, ...]:
    here, there = left.values if left else (), right.values if right else ()
    same = 0
    while same < min(len(here), len(there)) and here[same] == there[same]:
        same += 1
    return (*here[:same], *(replace(value, maybe=value.maybe or why) for value in (*here[same:], *there[same:])))
