"""A configuration as the trainer sees it: files merged, overrides applied, `${...}` resolved when a key is read.

Source: OmegaConf's grammar of interpolations; the resolvers `add`, `mul`, `div` and `max` are NeMo-RL's. OmegaConf
itself is not used: it resolves a value again for each reference, so that thirty lines with two references each take
days, and its resolvers read the environment of this process instead of that of the launch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, mul, truediv
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.isolation import HIDDEN, is_secret
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.hub_cache import hub_model
from ckptkit.verify.launch.settings.settings import Settings, SettingValue
from ckptkit.verify.launch.settings.tree import NULL, Tree, flat_settings
from ckptkit.verify.launch.words import UnresolvedWord, Word, changes_every_start

_RESOLVER = re.compile(r"\s*([A-Za-z_][\w.]*):(.*)", re.DOTALL)
# Values other than text, and numbers with the same spelling in Python.
_TYPED = re.compile(r"(?i:true|false|null|[-+]?(?:inf|nan)|[-+]?[\d_.]+(?:e[-+]?\d+)?)")
_SPELLED = re.compile(r"0|-?[1-9]\d*|-?(?:0|[1-9]\d{0,9})\.(?:0|\d{0,5}[1-9])|[^\d]*\.[^\d]*")
_MAX_DEPTH = 30
_MAX_CHARACTERS = 10_000  # characters of a value with interpolations, before and after
_NUMBERS: dict[str, Callable[..., float]] = {"add": add, "mul": mul, "div": truediv, "max": max}
TRUE, FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")  # a path on another machine


class UnresolvedError(Exception):
    """A value depends on something unknown, which the message names."""


@dataclass
class Config(Settings):
    """The settings of YAML files and overrides, by dotted key."""

    tree: Mapping[str, Tree]
    environment: Mapping[str, str] = field(default_factory=dict)  # variables for `${oc.env:NAME}`
    stand_in: Path | None = None  # the directory on the command line, for the model of the keys `stands_for`
    stands_for: frozenset[str] = frozenset()
    files: Sequence[str] = ()  # names of files with settings of the launch
    groups: Sequence[Word] = ()  # words that select a file of a folder (`engine=megatron`)
    unread: list[str] = field(default_factory=list)  # keys that cannot be resolved or are not local: inconclusive
    notes: list[str] = field(default_factory=list)  # remarks on loaded files
    _unresolved: set[str] = field(default_factory=set)
    _values: dict[tuple[str, tuple[str, ...]], Tree] = field(default_factory=dict, init=False, repr=False)

    def find(self, key: str) -> Tree | None:
        """The resolved value of a dotted key, at the key's place, or None if absent or null. Raises UnresolvedError."""
        node = self._node(tuple(key.split(".")), 0)
        if _is_word(node, "???"):
            raise UnresolvedError("??? marks a value that the launch must set")
        return None if _is_word(node, NULL) else node

    def _node(self, keys: tuple[str, ...], depth: int) -> Tree | None:
        node: Tree | None = dict(self.tree)
        for index, key in enumerate(keys):
            if isinstance(node, Word):
                node = self._resolve(node, keys[:index], depth)
            if isinstance(node, dict):
                node = node.get(key)
            elif isinstance(node, list) and key.isdecimal() and len(key) < 10 and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return self._resolve(node, keys, depth) if isinstance(node, Word) else node

    def _resolve(self, word: Word, at: tuple[str, ...], depth: int) -> Tree:
        """Resolves the interpolations in a word; the value of a single one may be a mapping."""
        if isinstance(word, UnresolvedWord):
            raise UnresolvedError(f"{word.text}: {word.why}")
        if "${" not in word.text:
            return word
        if len(word.text) > _MAX_CHARACTERS:
            raise UnresolvedError(f"a value of {len(word.text)} characters")
        if depth > _MAX_DEPTH:
            raise UnresolvedError(f"{word.text} refers to itself")
        parts = list(_parts(word.text))
        if len(parts) == 1:
            node = self._value(parts[0][1], at, depth)
            return replace(word, text=node.text) if isinstance(node, Word) else node
        text = ""
        for is_interpolation, part in parts:
            text += self._single(part, at, depth) if is_interpolation else part
            if len(text) > _MAX_CHARACTERS:
                raise UnresolvedError(f"{shortened(word.text)} expands to more than {_MAX_CHARACTERS} characters")
        return replace(word, text=text)

    def _single(self, inner: str, at: tuple[str, ...], depth: int) -> str:
        node = self._value(inner, at, depth)
        if not isinstance(node, Word):
            raise UnresolvedError(f"${{{inner}}} is not a single value")
        if not _SPELLED.fullmatch(node.text) and _TYPED.fullmatch(node.text):
            raise UnresolvedError(f"${{{inner}}}: {node.text} in a text is written as in Python")
        return node.text

    def _value(self, inner: str, at: tuple[str, ...], depth: int) -> Tree:
        """The value of `${inner}` in the value of the key `at`, which is computed once."""
        if (inner, at) not in self._values:
            if match := _RESOLVER.fullmatch(inner):
                arguments = [self._argument(argument, at, depth) for argument in _arguments(match[2])]
                node: Tree | None = self._call(match[1], arguments, at, depth, inner)
            else:
                node = self._node(_absolute(self._argument(inner, at, depth), at), depth + 1)
            if node is None:
                raise UnresolvedError(f"${{{inner}}} refers to a setting that does not exist")
            self._values[inner, at] = node
        return self._values[inner, at]

    def _argument(self, text: str, at: tuple[str, ...], depth: int) -> str:
        text = text.strip()
        if "${" in text:
            node = self._resolve(Word(text), at, depth + 1)
            if not isinstance(node, Word):
                raise UnresolvedError(f"{text} is not a single value")
            text = node.text
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text

    def _call(self, name: str, arguments: list[str], at: tuple[str, ...], depth: int, inner: str) -> Tree:
        if name == "oc.env" and arguments:
            variable = arguments[0]
            if is_secret(variable, self.environment.get(variable, "")):
                raise UnresolvedError(f"${{{inner}}}: {HIDDEN}")
            if variable not in self.environment and len(arguments) != 2:
                raise UnresolvedError(f"${{{inner}}}: the variable {variable} is not set")
            return Word(self.environment.get(variable, arguments[-1]))
        if name == "oc.select" and arguments:
            node = self._node(_absolute(arguments[0], at), depth + 1)
            default: Tree = {} if arguments[1:] == ["{}"] else Word(arguments[1] if arguments[1:] else NULL)
            return default if node is None or _is_word(node, NULL) else node
        if name in _NUMBERS and len(arguments) == 2:
            try:
                value = _NUMBERS[name](*map(float, arguments))
            except (ValueError, ZeroDivisionError, OverflowError) as error:
                raise UnresolvedError(f"${{{inner}}} is not a number: {error}") from error
            return Word(str(int(value)) if value.is_integer() else str(value))
        raise UnresolvedError(f"${{{inner}}}: ckptkit does not know the resolver {name}")

    def names(self, prefix: str = "") -> Iterator[str]:
        """The dotted key of every word, with the index for words of lists."""
        node: Tree | None = dict(self.tree)
        for key in filter(None, prefix.split(".")):
            node = node.get(key) if isinstance(node, dict) else None
        yield from () if node is None else (key for key, _ in flat_settings(node, prefix))

    def silent_copy(self) -> Config:
        """The same settings with another `unread`, for keys without influence on the verdict."""
        return Config(self.tree, self.environment)

    def get(self, key: str) -> SettingValue:
        """The value of a key, which is None if it is absent, null, a mapping, or cannot be resolved."""
        try:
            node = self.find(key)
        except UnresolvedError as reason:
            if key not in self._unresolved:
                self._unresolved.add(key)
                self.unread.append(f"{key}: {reason}")
            return SettingValue(known=False)
        return SettingValue(node.text, node) if isinstance(node, Word) else SettingValue()

    def is_new(self, key: str) -> bool:
        """Whether a name contains the time of the start, so that its file cannot exist yet."""
        try:
            self.find(key)
        except UnresolvedError as reason:
            return changes_every_start(str(reason))
        return False

    def first(self, *keys: str) -> str:
        """The first of these keys with a value, or the last key."""
        return next(filter(self.has, keys), keys[-1])

    def text(self, key: str, default: str = "") -> str:
        """The value of a key, or `default`."""
        value = self.get(key).value
        return default if value is None else str(value)

    def listed(self, key: str, default: str = "") -> str:
        """The values of a list with commas between them, or a single value, or `default`."""
        return ", ".join(self.text(name) for name in self.names(key) if self.has(name)) or default

    def number(self, key: str, default: int | None = None) -> int | None:
        """An integer, `default` if not set, or None if unresolved. Raises CkptkitError if the value is not a number."""
        setting = self.get(key)
        if setting.value is None:
            return default if setting.known else None
        text = setting.value.replace("_", "").removesuffix(".0")
        if not (text.isdecimal() and len(text) < 10):
            raise CkptkitError(f"{key}={setting.value} ({setting.where}) is not a number", "set a number")
        return int(text)

    def size(self, key: str, default: int | None = 1) -> int | None:
        """A number of ranks, as `number`. Raises CkptkitError also for 0."""
        size = self.number(key, default)
        if size == 0:
            raise CkptkitError(f"{key}=0 is not a number of ranks", "set it to 1 or more, or remove it")
        return size

    def switch(self, key: str, default: bool = False) -> bool:
        """A boolean, or `default` if it is not set or cannot be resolved. Raises CkptkitError for any other value."""
        setting = self.get(key)
        if setting.value is None:
            return default
        if setting.value.lower() not in TRUE | FALSE:
            raise CkptkitError(f"{key}={setting.value} ({setting.where}) is not true or false", "set true or false")
        return setting.value.lower() in TRUE

    def is_on(self, key: str) -> bool:
        """Whether a key is certainly true."""
        return self.text(key).lower() in TRUE

    def is_off(self, key: str) -> bool:
        """Whether a key is certainly false, absent or null."""
        return self.get(key).known and (not self.has(key) or self.text(key).lower() in FALSE)

    def above_zero(self, key: str, default: float = 0.0) -> bool:
        """Whether a number is above zero. Raises CkptkitError for a value that is not a number."""
        setting = self.get(key)
        try:
            return float(default if setting.value is None else setting.value) > 0
        except ValueError:
            raise CkptkitError(f"{key}={setting.value} ({setting.where}) is not a number", "set a number") from None

    def model(self, key: str) -> Path | None:
        """A model's local directory, for a name on a hub a complete snapshot, or None with the reason in `unread`."""
        before = len(self.unread)
        path = self._model(key)
        if self.stand_in is None or key not in self.stands_for:
            return path
        del self.unread[before:]
        if path and os.path.abspath(path) != os.path.abspath(self.stand_in):
            note = f"--hf-checkpoint {self.stand_in} was checked, although {self.cite(key)} is {path}"
            self.notes += [] if note in self.notes else [note]
        return self.stand_in

    def _model(self, key: str) -> Path | None:
        setting = self.get(key)
        if setting.value is None:
            if setting.known:
                self._report(f"{key} is not set, so the model is unknown")
            return None
        path = Path(setting.value)
        if path.exists():
            return path
        if _REMOTE.match(setting.value):
            self._report(f"{self.cite(key)} {setting.value}: not on this machine; copy it here and pass its directory")
            return None
        if (hub := hub_model(setting.value, self.environment)) is None:
            return path
        if hub.path is None:
            hint = f"pass a local copy of it{' as --hf-checkpoint' if key in self.stands_for else ''}"
            self._report(f"{self.cite(key)} {setting.value}: a name on a model hub, {hub.why}; {hint}")
        elif not hub.path.exists():
            note = f"{self.cite(key)} is {hub.why}"
            self.notes += [] if note in self.notes else [note]
        return hub.path

    def report_unchecked(self, pattern: re.Pattern[str]) -> None:
        """Adds a line to `unread` for every key that matches and is not false, empty or null."""
        for key in self.names():
            if pattern.search(key) and self.text(key).lower() not in ("false", "", "{}", "[]"):
                self._report(f"{self.cite(key)} {self.text(key)}: ckptkit does not read this setting")

    def _report(self, line: str) -> None:
        if line not in self.unread:
            self.unread.append(line)


def _is_word(node: Tree | None, text: str) -> bool:
    return isinstance(node, Word) and node.text == text


def _absolute(key: str, at: tuple[str, ...]) -> tuple[str, ...]:
    """The absolute form of a key such as `.x` or `..x` in the value of `at`: one dot is the mapping around it."""
    name = key.lstrip(".")
    dots = len(key) - len(name)
    keys = name.replace("[", ".").replace("]", "").split(".")
    return (*at[: len(at) - dots], *keys) if dots else tuple(keys)


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of a text in order: True with the content of `${...}`, False with other text."""
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
    """The position of the brace that closes the one before `start`, or -1."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return index
    return -1


def _arguments(text: str) -> list[str]:
    """The arguments of a resolver, which are separated by commas outside braces."""
    arguments, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            arguments.append("")
        else:
            arguments[-1] += character
    return arguments
