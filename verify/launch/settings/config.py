"""A configuration as the trainer sees it: files merged, overrides applied, `${...}` resolved when a key is asked for.

Source: OmegaConf's grammar of interpolations; the resolvers `add`, `mul`, `div` and `max` are NeMo-RL's. OmegaConf
itself is not used: it resolves a value again wherever it is named, so that thirty lines which name one another twice
take days, and its resolvers read the environment of this process instead of that of the launch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.isolation import HIDDEN, is_secret
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.hub_cache import hub_model
from ckptkit.verify.launch.settings.settings import GivenValue, Settings
from ckptkit.verify.launch.settings.tree import NULL, Tree, flat_settings
from ckptkit.verify.launch.words import UnresolvedWord, Word, changes_every_start

_RESOLVER = re.compile(r"\s*([A-Za-z_][\w.]*):(.*)", re.DOTALL)
# What is not text, and numbers that Python spells as they are written.
_TYPED = re.compile(r"(?i:true|false|null|[-+]?(?:inf|nan)|[-+]?[\d_.]+(?:e[-+]?\d+)?)")
_SPELLED = re.compile(r"0|-?[1-9]\d*|-?(?:0|[1-9]\d{0,9})\.(?:0|\d{0,5}[1-9])|[^\d]*\.[^\d]*")
_MAX_DEPTH = 30
_MAX_CHARACTERS = 10_000  # characters of a value with interpolations, before and after
_NUMBERS: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
}
TRUE, FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})
# What stands before a path of another machine.
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")


class UnresolvedError(Exception):
    """A value that depends on something that is not known. Its message says on what."""


@dataclass
class Config(Settings):
    """The settings of YAML files and overrides, by dotted key.

    environment: the variables that `${oc.env:NAME}` may name.
    stand_in: the directory that the command line gives for the model of the keys `stands_for`, before these.
    files: names of files that the launch takes settings from.
    groups: the words that choose a file of a folder (`engine=megatron`).
    unread: a line for each key that was asked for, and cannot be resolved or is not local; then a report is
    inconclusive.
    notes: remarks on what is loaded.
    """

    tree: Mapping[str, Tree]
    environment: Mapping[str, str] = field(default_factory=dict)
    stand_in: Path | None = None
    stands_for: frozenset[str] = frozenset()
    files: Sequence[str] = ()
    groups: Sequence[Word] = ()
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _unresolved: set[str] = field(default_factory=set)
    _values: dict[tuple[str, tuple[str, ...]], Tree] = field(default_factory=dict, init=False, repr=False)

    def find(self, key: str) -> Tree | None:
        """What a dotted key holds, interpolations resolved; None where it is absent or null.

        A word keeps the place where its key is written. Raises UnresolvedError.
        """
        node = self._node(tuple(key.split(".")), 0)
        if isinstance(node, Word) and node.text == "???":
            raise UnresolvedError("??? is a value that the launch must give")
        return None if isinstance(node, Word) and node.text == NULL else node

    def _node(self, keys: tuple[str, ...], depth: int) -> Tree | None:
        node: Tree | None = dict(self.tree)
        for index, key in enumerate(keys):
            if isinstance(node, Word):
                node = self._resolved(node, keys[:index], depth)
            if isinstance(node, dict):
                node = node.get(key)
            elif isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return self._resolved(node, keys, depth) if isinstance(node, Word) else node

    def _resolved(self, word: Word, at: tuple[str, ...], depth: int) -> Tree:
        """A word whose interpolations are resolved; what one names as a whole may be a mapping."""
        if isinstance(word, UnresolvedWord):
            raise UnresolvedError(f"{word.text}: {word.why}")
        if "${" not in word.text:
            return word
        if len(word.text) > _MAX_CHARACTERS:
            raise UnresolvedError(f"a value of {len(word.text)} characters")
        if depth > _MAX_DEPTH:
            raise UnresolvedError(f"{word.text} goes in circles")
        parts = list(_parts(word.text))
        if len(parts) == 1:
            node = self._value(parts[0][1], at, depth)
            return replace(word, text=node.text) if isinstance(node, Word) else node
        text = ""
        for piece in self._text(parts, at, depth):
            text += piece
            if len(text) > _MAX_CHARACTERS:
                raise UnresolvedError(f"{shortened(word.text)} expands to more than {_MAX_CHARACTERS} characters")
        return replace(word, text=text)

    def _text(self, parts: list[tuple[bool, str]], at: tuple[str, ...], depth: int) -> Iterator[str]:
        for is_interpolation, text in parts:
            if not is_interpolation:
                yield text
                continue
            node = self._value(text, at, depth)
            if not isinstance(node, Word):
                raise UnresolvedError(f"${{{text}}} is not a single value")
            if not _SPELLED.fullmatch(node.text) and _TYPED.fullmatch(node.text):
                raise UnresolvedError(f"${{{text}}}: {node.text} in a text is spelled as Python has it")
            yield node.text

    def _value(self, inner: str, at: tuple[str, ...], depth: int) -> Tree:
        """What stands for `${inner}` in the value of the key `at`: worked out once, however often it stands there."""
        if (inner, at) not in self._values:
            self._values[inner, at] = self._worked_out(inner, at, depth)
        return self._values[inner, at]

    def _worked_out(self, inner: str, at: tuple[str, ...], depth: int) -> Tree:
        if match := _RESOLVER.fullmatch(inner):
            arguments = [self._argument(one, at, depth) for one in _arguments(match[2])]
            return self._call(match[1], arguments, at, depth, inner)
        key = self._argument(inner, at, depth)
        node = self._node(_absolute(key, at), depth + 1)
        if node is None:
            raise UnresolvedError(f"${{{inner}}} names no setting of this configuration")
        return node

    def _argument(self, text: str, at: tuple[str, ...], depth: int) -> str:
        text = text.strip()
        if "${" in text:
            node = self._resolved(Word(text), at, depth + 1)
            if not isinstance(node, Word):
                raise UnresolvedError(f"{text} is not a single value")
            text = node.text
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text

    def _call(self, name: str, arguments: list[str], at: tuple[str, ...], depth: int, inner: str) -> Tree:
        if name == "oc.env" and arguments and is_secret(arguments[0], self.environment.get(arguments[0], "")):
            raise UnresolvedError(f"${{{inner}}}: {HIDDEN}")
        if name == "oc.env" and arguments and (arguments[0] in self.environment or len(arguments) == 2):
            return Word(self.environment.get(arguments[0], arguments[-1]))
        if name == "oc.env" and arguments:
            raise UnresolvedError(f"${{{inner}}}: the variable {arguments[0]} is not set")
        if name == "oc.select" and arguments:
            node = self._node(_absolute(arguments[0], at), depth + 1)
            is_null = node is None or (isinstance(node, Word) and node.text == NULL)
            default: Tree = {} if arguments[1:] == ["{}"] else Word(arguments[1] if arguments[1:] else NULL)
            return default if is_null or node is None else node
        if name in _NUMBERS and len(arguments) == 2:
            try:
                value = _NUMBERS[name](*(float(one) for one in arguments))
            except (ValueError, ZeroDivisionError, OverflowError) as error:
                raise UnresolvedError(f"${{{inner}}} is not a number: {error}") from error
            return Word(str(int(value)) if value.is_integer() else str(value))
        raise UnresolvedError(f"${{{inner}}}: the resolver {name} is not known")

    def names(self, prefix: str = "") -> Iterator[str]:
        """The dotted key of every word, those of lists with their index."""
        node: Tree | None = dict(self.tree)
        for key in filter(None, prefix.split(".")):
            node = node.get(key) if isinstance(node, dict) else None
        yield from () if node is None else (key for key, _ in flat_settings(node, prefix))

    def quietly(self) -> Config:
        """The same settings with another list of what could not be resolved: for questions that nothing hangs on."""
        return Config(self.tree, self.environment)

    def get(self, key: str) -> GivenValue:
        """The value of a key; None where it is absent, null, a mapping, or cannot be resolved."""
        try:
            node = self.find(key)
        except UnresolvedError as reason:
            if key not in self._unresolved:
                self._unresolved.add(key)
                self.unread.append(f"{key}: {reason}")
            return GivenValue(known=False)
        return GivenValue(node.text, node) if isinstance(node, Word) else GivenValue()

    def is_new(self, key: str) -> bool:
        """Whether a name has the time of the start in it, so that nothing of that name can be there yet."""
        try:
            self.find(key)
        except UnresolvedError as reason:
            return changes_every_start(str(reason))
        return False

    def first(self, *keys: str) -> str:
        """The first of these keys that has a value; the last one if none has."""
        return next(filter(self.has, keys), keys[-1])

    def text(self, key: str, default: str = "") -> str:
        """The value of a key, `default` where there is none."""
        found = self.get(key)
        return default if found.value is None else str(found.value)

    def listed(self, key: str, default: str = "") -> str:
        """The values of a list with commas between them, or a value by itself; `default` where there is none."""
        return ", ".join(self.text(name) for name in self.names(key) if self.has(name)) or default

    def number(self, key: str, default: int | None = None) -> int | None:
        """A whole number; `default` where there is none; None where it cannot be resolved.

        Raises CkptkitError for a value that is not a number.
        """
        found = self.get(key)
        if found.value is None:
            return default if found.known else None
        text = found.value.replace("_", "").removesuffix(".0")
        if not (text.isdecimal() and len(text) < 10):
            raise CkptkitError(
                f"{key}={found.value} ({found.where}) is not a number", "give the number that the job has"
            )
        return int(text)

    def size(self, key: str, default: int | None = 1) -> int | None:
        """A number of ranks, as `number`. Raises CkptkitError for 0 too."""
        found = self.number(key, default)
        if found == 0:
            raise CkptkitError(f"{key}=0 is not a number of ranks", "give 1 or more, or leave it out")
        return found

    def switch(self, key: str, default: bool = False) -> bool:
        """A truth value, `default` where there is none or it cannot be resolved. Raises CkptkitError for another."""
        found = self.get(key)
        if found.value is None:
            return default
        if found.value.lower() not in TRUE | FALSE:
            raise CkptkitError(f"{key}={found.value} ({found.where}) is neither true nor false", "give one of them")
        return found.value.lower() in TRUE

    def is_on(self, key: str) -> bool:
        """Whether a key is true for certain."""
        return self.text(key).lower() in TRUE

    def is_off(self, key: str) -> bool:
        """Whether a key is false, absent or null for certain."""
        return self.get(key).known and (not self.has(key) or self.text(key).lower() in FALSE)

    def above_zero(self, key: str, default: float = 0.0) -> bool:
        """Whether a number is above zero. Raises CkptkitError for a value that is not a number."""
        found = self.get(key)
        try:
            return float(default if found.value is None else found.value) > 0
        except ValueError:
            raise CkptkitError(f"{key}={found.value} ({found.where}) is not a number", "give the number") from None

    def model(self, key: str) -> Path | None:
        """The local directory of a model; None where there is none, with a line in `unread` that says why.

        A name on a hub is its snapshot in the local cache. Where that is not whole the trainer downloads it, and nobody
        can say here what it will hold. The directory of the command line counts before that of a setting, and a note
        says so.
        """
        stand_in = self.stand_in if key in self.stands_for else None
        before = len(self.unread)
        found = self._model(key)
        if stand_in is None:
            return found
        del self.unread[before:]
        if found and os.path.abspath(found) != os.path.abspath(stand_in):
            note = f"--hf-checkpoint {stand_in} was looked at, although {self.cite(key)} says {found}"
            self.notes += [] if note in self.notes else [note]
        return stand_in

    def _model(self, key: str) -> Path | None:
        found = self.get(key)
        if found.value is None:
            if found.known:
                self._say(f"{key} is not given, so nothing says which model this is")
            return None
        path = Path(found.value)
        if path.exists():
            return path
        if _REMOTE.match(found.value):
            self._say(f"{self.cite(key)} {found.value}: not on this machine; copy it here and give its directory")
            return None
        if (hub := hub_model(found.value, self.environment)) is None:
            return path
        if hub.path is None:
            hint = f"give a local copy of it{' as --hf-checkpoint' if key in self.stands_for else ''}"
            self._say(f"{self.cite(key)} {found.value}: a name on a model hub, {hub.why}; {hint}")
        elif not hub.path.exists():
            note = f"{self.cite(key)} is {hub.why}"
            self.notes += [] if note in self.notes else [note]
        return hub.path

    def report_unread(self, pattern: re.Pattern[str]) -> None:
        """Adds a line for every key that matches, is given, and neither false, empty nor null."""
        for key in self.names():
            if pattern.search(key) and self.text(key).lower() not in ("false", "", "{}", "[]"):
                self._say(f"{self.cite(key)} {self.text(key)}: not looked at")

    def _say(self, line: str) -> None:
        if line not in self.unread:
            self.unread.append(line)


def _absolute(key: str, at: tuple[str, ...]) -> tuple[str, ...]:
    """The key that `.x` or `..x` names from the value of `at`: one dot is the mapping around it."""
    name = key.lstrip(".")
    dots = len(key) - len(name)
    name = name.replace("[", ".").replace("]", "")
    return (*at[: len(at) - dots], *name.split(".")) if dots else tuple(name.split("."))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Text and what stands between `${` and its brace, in their order; an interpolation is marked True."""
    start = 0
    while (opened := text.find("${", start)) >= 0:
        if opened > start:
            yield False, text[start:opened]
        if (closed := closing(text, opened + 2)) < 0:
            raise UnresolvedError(f"{text} has no closing brace")
        yield True, text[opened + 2 : closed]
        start = closed + 1
    if start < len(text):
        yield False, text[start:]


def closing(text: str, start: int) -> int:
    """Where the brace that is open at `start` is closed; -1 where it is not."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return index
    return -1


def _arguments(text: str) -> list[str]:
    """The arguments of a resolver: parted by commas outside braces."""
    found, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found
