"""A configuration as the trainer sees it: files merged, overrides applied, `${...}` resolved when a key is asked for.

YAML is read into mappings, lists and words that know their line; nothing in it is executed.

Source: OmegaConf's grammar of interpolations; the resolvers `add`, `mul`, `div` and `max` are NeMo-RL's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from ckptkit.core.errors import CkptkitError
from ckptkit.core.isolation import HIDDEN, is_secret
from ckptkit.core.printable import shortened
from ckptkit.formats import yaml_text
from ckptkit.formats.yaml_text import MAX_BYTES
from ckptkit.storage.regular import read_regular
from verify.launch.words import UnresolvedWord, Word

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


class UnresolvedError(Exception):
    """A value that depends on something that is not known. Its message says on what."""


@dataclass(frozen=True)
class Config:
    """Settings by dotted key. `environment` holds the variables that `${oc.env:NAME}` may name."""

    tree: Mapping[str, Tree]
    environment: Mapping[str, str] = field(default_factory=dict)
    _values: dict[tuple[str, tuple[str, ...]], Tree] = field(default_factory=dict, compare=False, repr=False)

    def find(self, key: str) -> Tree | None:
        """What a dotted key holds, interpolations resolved; None where it is absent or null.

        A word keeps the place where its key is written. Raises UnresolvedError.
        """
        node = self._node(tuple(key.split(".")), 0)
        if isinstance(node, Word) and node.text == "???":
            raise UnresolvedError("??? stands for a value that the launch must give")
        return None if isinstance(node, Word) and node.text == NULL else node

    def names(self, prefix: str = "") -> Iterator[str]:
        """The dotted key of every word, those of lists with their index."""
        node: Tree | None = self.tree if isinstance(self.tree, dict) else dict(self.tree)
        for key in filter(None, prefix.split(".")):
            node = node.get(key) if isinstance(node, dict) else None
        yield from () if node is None else (key for key, _ in flat_settings(node, prefix))

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
                raise UnresolvedError(f"{shortened(word.text)} stands for more than {_MAX_CHARACTERS} characters")
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


def merged_settings(base: Mapping[str, Tree], over: Mapping[str, Tree]) -> dict[str, Tree]:
    """`over` laid upon `base`, as OmegaConf merges: mappings key by key, anything else as a whole."""
    found = dict(base)
    for key, value in over.items():
        before = found.get(key)
        found[key] = merged_settings(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def flat_settings(
    tree: Tree | Mapping[str, Tree], prefix: str = "", *, lists: bool = True
) -> Iterator[tuple[str, Word]]:
    """Every word with its dotted key; those of lists with their index, or not at all."""
    if isinstance(tree, Word):
        yield prefix, tree
        return
    entries = enumerate(tree if lists else ()) if isinstance(tree, list) else tree.items()
    for key, value in entries:
        yield from flat_settings(value, f"{prefix}.{key}" if prefix else str(key), lists=lists)


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


Tree: TypeAlias = "dict[str, Tree] | list[Tree] | Word"

NULL = "null"


def read_yaml(path: Path) -> dict[str, Tree]:
    """The mapping that a YAML file holds; an empty file is an empty mapping.

    A null is the word `null`. Raises CkptkitError for a file that cannot be read, is no mapping, has a key twice, or
    is too large (1 MB, 64 levels, 50,000 values with aliases expanded).
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CkptkitError(f"{path}: {reason}", "check the path of the configuration") from error
    try:
        tree = parse_yaml(data.decode(), path)
    except UnicodeDecodeError as error:
        raise _refused(path, "is not UTF-8 text") from error
    if not isinstance(tree, dict):
        raise _refused(path, "holds no mapping")
    return tree


def parse_yaml(text: str, path: Path | None = None) -> Tree:
    """The tree of a YAML document; empty text is an empty mapping. Raises as `read_yaml`."""
    try:
        return _words(yaml_text.parse(text), path)
    except ValueError as error:
        raise _refused(path, str(error)) from error
    except RecursionError as error:
        raise _refused(path, "nested too deeply, aliases expanded") from error


def _words(tree: yaml_text.Tree, path: Path | None) -> Tree:
    if isinstance(tree, dict):
        return {key: _words(one, path) for key, one in tree.items()}
    if isinstance(tree, list):
        return [_words(one, path) for one in tree]
    return Word(NULL if tree.is_null else tree.text, path, None if path is None else tree.line)


def _refused(path: Path | None, why: str) -> CkptkitError:
    return CkptkitError(f"{path or 'a value on the command line'}: {why}", "give the YAML file as the trainer reads it")
