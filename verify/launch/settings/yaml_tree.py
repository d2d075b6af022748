"""Reads a YAML file into mappings, lists and words that know their line; nothing in it is executed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.regular import read_regular
from verify.launch.words import Word

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | Word"

NULL = "null"
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
# Configurations are a few hundred lines; aliases can make a small file stand for a huge one.
MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1 << 20, 64, 50_000
_MERGE = "<<"


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
        tree = parse(data.decode(), path)
    except UnicodeDecodeError as error:
        raise _refused(path, "is not UTF-8 text") from error
    if not isinstance(tree, dict):
        raise _refused(path, "holds no mapping")
    return tree


def parse(text: str, path: Path | None = None) -> Tree:
    """The tree of a YAML document; empty text is an empty mapping. Raises as `read_yaml`."""
    try:
        return _Parser(text, path).document()
    except yaml.YAMLError as error:
        raise _refused(path, " ".join(str(error).split())) from error


def _refused(path: Path | None, why: str) -> CkptkitError:
    return CkptkitError(f"{path or 'a value on the command line'}: {why}", "give the YAML file as the trainer reads it")


class _Parser:
    """Builds the tree from events. Not from PyYAML's nodes: those are composed by recursion without a limit."""

    def __init__(self, text: str, path: Path | None) -> None:
        self.events: Iterator[Any] = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.path = path
        self.anchors: dict[str, tuple[Tree, int]] = {}
        self.count = 0

    def document(self) -> Tree:
        tree: Tree | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if tree is not None:
                    raise self._error(event, "a second document")
                tree = self._node(next(self.events), 0)
        return {} if tree is None or (isinstance(tree, Word) and tree.text == NULL) else tree

    def _node(self, event: Any, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise self._error(event, f"more than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self._error(event, f"the alias *{event.anchor} stands for nothing before it")
            tree, size = self.anchors[event.anchor]
            self._counted(event, size)
            return tree
        before = self.count
        self._counted(event, 1)
        if isinstance(event, yaml.MappingStartEvent):
            tree = self._mapping(event, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            tree = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                tree.append(self._node(item, depth + 1))
        else:
            plain = event.implicit[0] and event.value in _NULLS
            tree = Word(NULL if plain else event.value, self.path, self._line(event))
        if event.anchor:
            if event.anchor in self.anchors:
                raise self._error(event, f"the anchor &{event.anchor} stands twice")
            self.anchors[event.anchor] = tree, self.count - before
        return tree

    def _mapping(self, start: Any, depth: int) -> dict[str, Tree]:
        """A mapping; those under `<<` stand behind its own keys, and behind those of a later `<<`, as PyYAML has it."""
        own: dict[str, Tree] = {}
        merged: list[list[Tree]] = []
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            value = self._node(next(self.events), depth + 1)
            if not isinstance(key, Word):
                raise self._error(event, "a key that is not a word")
            if key.text == _MERGE and (isinstance(event, yaml.AliasEvent) or event.implicit[0]):  # not in quotes
                merged.append(value if isinstance(value, list) else [value])
            elif key.text in own:
                raise self._error(event, f"the key {key.text!r} stands twice in one mapping")
            else:
                own[key.text] = value
        for one in itertools.chain.from_iterable(reversed(merged)):
            if not isinstance(one, dict):
                raise self._error(start, f"{_MERGE} with something that is not a mapping")
            for name, value in one.items():
                own.setdefault(name, value)
        return own

    def _counted(self, event: Any, size: int) -> None:
        self.count += size
        if self.count > MAX_VALUES:
            raise self._error(event, f"more than {MAX_VALUES} values, aliases expanded")

    def _line(self, event: Any) -> int | None:
        return None if self.path is None else event.start_mark.line + 1

    def _error(self, event: Any, why: str) -> CkptkitError:
        return _refused(self.path, f"line {event.start_mark.line + 1}: {why}")
