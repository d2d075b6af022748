"""Values of a Python file: plain Python values, unknown values, texts with unknown parts, objects, functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

MAX_STEPS = 50_000
MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 40
ENVIRONMENT = 0  # the key of the environment in `State.objects`


class TooMuchError(Exception):
    """A script or file does more than a launch does; the message is the limit that it reached."""


def why_unread(error: Exception) -> str:
    """Why a Python file was not read to its end. The parser's own errors for deep nesting have no useful text."""
    return "Python nests it too deeply" if isinstance(error, RecursionError | MemoryError) else str(error)


@dataclass(frozen=True)
class Unknown:
    """An unknown value: its source, and the reason."""

    source: str
    why: str


@dataclass(frozen=True)
class Conditional:
    """A part of a text that exists only under an undecidable condition."""

    pieces: tuple[Piece, ...]
    why: str


Piece = str | Unknown | Conditional


@dataclass(frozen=True)
class Text:
    """A text with unknown parts."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class PythonFunction:
    """A function or lambda of a file; `bound` is the object of a method."""

    node: ast.FunctionDef | ast.Lambda
    module: Module
    bound: Object | None = None


@dataclass(frozen=True)
class Class:
    """A dataclass: its fields with defaults, inherited ones first, and its methods."""

    name: str
    fields: Mapping[str, ast.AnnAssign]
    methods: Mapping[str, PythonFunction]
    modules: Mapping[str, Module]  # the file of each field


@dataclass(frozen=True)
class Object:
    """An instance of a dataclass; its attributes are in `State.objects` under its number."""

    number: int
    kind: Class = field(compare=False, hash=False)


@dataclass(frozen=True)
class Module:
    """A file: its path, and its names, which are filled in while it is read."""

    path: Path
    names: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True)
class Builtin:
    """A function that is evaluated for known arguments."""

    name: str
    call: Callable[..., Any] = field(compare=False)


@dataclass
class State:
    """Local names by call, attributes of objects, and the amount of work; all branches share `steps`."""

    frames: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    objects: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=lambda: [0])

    def step(self, count: int = 1) -> None:
        """Counts work. Raises TooMuchError after `MAX_STEPS`."""
        self.steps[0] += count
        if self.steps[0] > MAX_STEPS or len(self.frames) > MAX_DEPTH:
            raise TooMuchError("it runs more steps than a launch needs")

    def variable(self, name: Any, default: Any) -> Any:
        """`os.environ.get(name, default)`."""
        if not isinstance(name, str):
            return Unknown("...", "a variable of unknown name")
        return self.objects.get(ENVIRONMENT, {}).get(name, default)

    def branch(self) -> State:
        """A copy with separate names and attributes."""
        objects = {number: dict(attributes) for number, attributes in self.objects.items()}
        return State([dict(frame) for frame in self.frames], objects, self.steps)

    def take_over(self, other: State) -> None:
        """Makes a branch's names and attributes this one's."""
        self.frames[:] = other.frames
        self.objects.clear()
        self.objects.update(other.objects)


def is_known(value: Any) -> bool:
    """Whether a value has no unknown part."""
    if isinstance(value, list | tuple | set):
        return all(map(is_known, value))
    if isinstance(value, dict):
        return all(is_known(item) for pair in value.items() for item in pair)
    return not isinstance(value, Unknown | Text)


def split_pieces(value: Any) -> tuple[Piece, ...]:
    """The parts of `str(value)`."""
    if isinstance(value, Text):
        return value.pieces
    if isinstance(value, Unknown):
        return (value,)
    if isinstance(value, str | int | float | bool) or value is None:
        return (str(value),)
    return (str(value) if is_known(value) else Unknown("...", "a collection with unknown values"),)


def join_pieces(pieces: Iterable[Piece]) -> str | Text:
    """A text of these parts, as a `str` if all of it is known. Raises TooMuchError if it is too long."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece != "":
            joined.append(piece)
    known = [piece for piece in joined if isinstance(piece, str)]
    if sum(map(len, known)) > MAX_CHARACTERS:
        raise TooMuchError(f"a text has more than {MAX_CHARACTERS} characters")
    return "".join(known) if len(known) == len(joined) else Text(tuple(joined))


def merge_values(first: Any, second: Any, why: str) -> Any:
    """A value that is one of two. Texts keep their common start."""
    if first == second and type(first) is type(second):
        return first
    if isinstance(first, str | Text) and isinstance(second, str | Text):
        return _merge_texts(list(split_pieces(first)), list(split_pieces(second)), why)
    return Unknown("...", why)


def _merge_texts(first: list[Piece], second: list[Piece], why: str) -> str | Text:
    same: list[Piece] = []
    while first and second and first[0] == second[0]:
        same.append(first.pop(0))
        second.pop(0)
    if first and second and isinstance(first[0], str) and isinstance(second[0], str):
        length = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first[0], second[0], strict=False))))
        # Words are not split: the common start ends after a blank.
        end = max(first[0].rfind(" ", 0, length), first[0].rfind("\n", 0, length)) + 1
        same.append(first[0][:end])
        first[0], second[0] = first[0][end:], second[0][end:]
    different = (tuple(piece for piece in side if piece != "") for side in (first, second))
    return join_pieces([*same, *(Conditional(pieces, why) for pieces in different if pieces)])


def merge_states(first: State, second: State, why: str) -> State:
    """The names and attributes after one of two branches, if it is not known which."""

    def merge(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
        names = left.keys() | right.keys()
        return {name: merge_values(left.get(name, MISSING), right.get(name, MISSING), why) for name in names}

    frames = [merge(left, right) for left, right in zip(first.frames, second.frames, strict=True)]
    objects = {number: merge(one, second.objects.get(number, one)) for number, one in first.objects.items()}
    return State(frames, second.objects | objects, first.steps)


MISSING = Unknown("", "it is not set")
