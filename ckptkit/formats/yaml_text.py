"""Parses YAML into mappings, lists and scalars that know their line, within bounds; nothing in it is executed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import yaml

# Configurations are a few hundred lines; aliases can make a small file stand for a huge one.
MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1 << 20, 64, 50_000
_MERGE = "<<"
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {text: value for value in (True, False) for text in (f"{value}", f"{value}".lower(), f"{value}".upper())}
_INTEGER = re.compile(r"[-+]?\d{1,100}")
_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?")
_SPECIAL = {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


class Scalar(NamedTuple):
    """A word of YAML: its text, whether it stands without quotes, and its line."""

    text: str
    plain: bool
    line: int

    @property
    def is_null(self) -> bool:
        """Whether it means nothing."""
        return self.plain and self.text in _NULLS


Tree: TypeAlias = "dict[str, Tree] | list[Tree] | Scalar"


def parse(text: str) -> Tree:
    """The tree of a YAML document; empty text is an empty mapping.

    Raises ValueError for text that is not YAML, has a second document, a key twice, or is past a bound of this module.
    """
    try:
        return _Parser(text).document()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def values(tree: Tree) -> Any:
    """The same as Python's own values: a tag is not looked at, and words in quotes are text."""
    if isinstance(tree, dict):
        return {key: values(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [values(one) for one in tree]
    text = tree.text
    if not tree.plain:
        return text
    if tree.is_null:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else _SPECIAL.get(text, text)


class _Parser:
    """Builds the tree from events. Not from PyYAML's nodes: those are composed by recursion without a limit."""

    def __init__(self, text: str) -> None:
        self.events: Iterator[Any] = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.anchors: dict[str, tuple[Tree, int]] = {}
        self.count = 0

    def document(self) -> Tree:
        tree: Tree | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if tree is not None:
                    raise self._error(event, "a second document")
                tree = self._node(next(self.events), 0)
        return {} if tree is None or (isinstance(tree, Scalar) and tree.is_null) else tree

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
            tree = Scalar(event.value, event.implicit[0], event.start_mark.line + 1)
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
            if not isinstance(key, Scalar):
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

    def _error(self, event: Any, why: str) -> ValueError:
        return ValueError(f"line {event.start_mark.line + 1}: {why}")
