"""What a Python file works with, as far as it is known: plain values, texts with unknown parts, objects, functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_STEPS = 50_000
MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 40
ENVIRONMENT = 0  # the number under which a state keeps the variables


class TooMuchPythonError(Exception):
    """A file does more than a launch does: the limit that it reached."""


def why_unread(error: Exception) -> str:
    """Why a Python file was not read to its end. The parser's errors for deep nesting have no text, or a poor one."""
    return "it nests deeper than Python parses" if isinstance(error, RecursionError | MemoryError) else str(error)


@dataclass(frozen=True)
class Unknown:
    """A value that is not known: how it is written, and why."""

    source: str
    why: str


@dataclass(frozen=True)
class Conditional:
    """A part of a text that is there only where a condition holds that nobody can decide."""

    pieces: tuple[Piece, ...]
    why: str


Piece = str | Unknown | Conditional


@dataclass(frozen=True)
class Text:
    """A text of which some parts are not known."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class PythonFunction:
    """A function or lambda of a file; `bound` is the object of a method."""

    node: ast.FunctionDef | ast.Lambda
    module: Module
    bound: Object | None = None


@dataclass(frozen=True)
class Class:
    """A dataclass: its fields with their defaults, those of its bases first, and its methods."""

    name: str
    fields: Mapping[str, ast.AnnAssign]
    methods: Mapping[str, PythonFunction]
    modules: Mapping[str, Module]  # the file in which each field stands


@dataclass(frozen=True)
class Object:
    """An instance of a dataclass; its attributes are kept in the state under its number."""

    number: int
    kind: Class = field(compare=False, hash=False)


@dataclass(frozen=True)
class Module:
    """A file: its path, and its names. `names` are filled while it is read."""

    path: Path
    names: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True)
class Builtin:
    """A function that is worked out here: of known arguments it gives its result."""

    name: str
    call: Callable[..., Any] = field(compare=False)


@dataclass
class State:
    """Local names by call, attributes of objects, and how much was done. `steps` is shared by all branches."""

    frames: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    objects: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=lambda: [0])

    def step(self, count: int = 1) -> None:
        """Counts work. Raises TooMuchPythonError after `MAX_STEPS`."""
        self.steps[0] += count
        if self.steps[0] > MAX_STEPS or len(self.frames) > MAX_DEPTH:
            raise TooMuchPythonError("it does more than a launch does")

    def variable(self, name: Any, default: Any) -> Any:
        """A variable of the environment, as `os.environ.get` gives it."""
        if not isinstance(name, str):
            return Unknown("...", "a variable of unknown name")
        return self.objects.get(ENVIRONMENT, {}).get(name, default)

    def branch(self) -> State:
        """A copy whose names and attributes change apart from this one's."""
        objects = {number: dict(attributes) for number, attributes in self.objects.items()}
        return State([dict(frame) for frame in self.frames], objects, self.steps)

    def take_over(self, other: State) -> None:
        """Makes a branch's names and attributes this one's."""
        self.frames[:] = other.frames
        self.objects.clear()
        self.objects.update(other.objects)


def is_known(value: Any) -> bool:
    """Whether nothing of a value is unknown."""
    if isinstance(value, Unknown | Text):
        return False
    if isinstance(value, list | tuple | set):
        return all(is_known(one) for one in value)
    return not isinstance(value, dict) or all(is_known(one) for pair in value.items() for one in pair)


def split_pieces(value: Any) -> tuple[Piece, ...]:
    """The parts of what `str` makes of a value."""
    if isinstance(value, Text):
        return value.pieces
    if isinstance(value, Unknown):
        return (value,)
    if isinstance(value, str | int | float | bool) or value is None:
        return (str(value),)
    return (str(value) if is_known(value) else Unknown("...", "a collection with values that are not known"),)


def join_pieces(pieces: Iterable[Piece]) -> str | Text:
    """A text of these parts, neighbours joined; a `str` where all of it is known. Raises TooMuchPythonError."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece != "":
            joined.append(piece)
    if sum(len(piece) for piece in joined if isinstance(piece, str)) > MAX_CHARACTERS:
        raise TooMuchPythonError(f"a text has more than {MAX_CHARACTERS} characters")
    if all(isinstance(piece, str) for piece in joined):
        return "".join(piece for piece in joined if isinstance(piece, str))
    return Text(tuple(joined))


def merge_values(one: Any, other: Any, why: str) -> Any:
    """A value that is one of two. Of texts that begin with the same parts these are kept."""
    if one == other and type(one) is type(other):
        return one
    if isinstance(one, str | Text) and isinstance(other, str | Text):
        return _merged_texts(list(split_pieces(one)), list(split_pieces(other)), why)
    return Unknown("...", why)


def _merged_texts(here: list[Piece], there: list[Piece], why: str) -> str | Text:
    same: list[Piece] = []
    while here and there and here[0] == there[0]:
        same.append(here.pop(0))
        there.pop(0)
    if here and there and isinstance(here[0], str) and isinstance(there[0], str):
        first, second = here[0], there[0]
        length = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
        length = min(len(first), len(second)) if length is None else length
        # Words stay whole: what is common ends behind a blank.
        cut = max(first.rfind(" ", 0, length), first.rfind("\n", 0, length)) + 1
        same.append(first[:cut])
        here[0], there[0] = first[cut:], second[cut:]
    rest = [Conditional(tuple(piece for piece in side if piece != ""), why) for side in (here, there)]
    return join_pieces([*same, *(piece for piece in rest if piece.pieces)])


def merge_states(one: State, other: State, why: str) -> State:
    """The names and attributes after one of two branches, where nobody knows which."""
    frames = [
        {
            name: merge_values(left.get(name, MISSING), right.get(name, MISSING), why)
            for name in left.keys() | right.keys()
        }
        for left, right in zip(one.frames, other.frames, strict=True)
    ]
    objects = {
        number: {
            name: merge_values(
                attributes.get(name, MISSING), other.objects.get(number, attributes).get(name, MISSING), why
            )
            for name in attributes.keys() | other.objects.get(number, {}).keys()
        }
        for number, attributes in one.objects.items()
    }
    return State(frames, other.objects | objects, one.steps)


MISSING = Unknown("", "it is not set")
