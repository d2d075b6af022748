"""Reads YAML with PyYAML's SafeLoader into mappings, lists and scalars with their line, within limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import yaml

# Configurations have a few hundred lines, but aliases can expand a small file to any size.
MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1 << 20, 64, 50_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_SAFE = yaml.constructor.SafeConstructor()
# Other scalars, such as dates and those with a Python tag, are text.
_CONSTRUCTORS: dict[str, Callable[[yaml.Node], Any]] = {
    f"{_TAG}null": _SAFE.construct_yaml_null,
    f"{_TAG}bool": _SAFE.construct_yaml_bool,
    f"{_TAG}int": _SAFE.construct_yaml_int,
    f"{_TAG}float": _SAFE.construct_yaml_float,
}


class Scalar(NamedTuple):
    """A word of YAML: its text, its value in Python, and its line."""

    text: str
    value: str | float | bool | None
    line: int


Tree: TypeAlias = "dict[str, Tree] | list[Tree] | Scalar"


def parse(text: str) -> Tree:
    """The tree of a YAML document. Raises ValueError for invalid YAML, repeated keys, or exceeded limits."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_LOADER):  # `compose` recurses without a limit
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _error(event, f"values are nested more than {MAX_DEPTH} levels deep")
        document = yaml.compose(text, Loader=_LOADER)
        tree = {} if document is None else _tree(document, 0, itertools.count(1))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except LookupError as error:  # of `!!bool x`
        raise ValueError(f"{error} does not have the type of its tag") from error
    return {} if isinstance(tree, Scalar) and tree.value is None else tree


def values(tree: Tree) -> Any:
    """The tree with values instead of scalars."""
    if isinstance(tree, dict):
        return {key: values(one) for key, one in tree.items()}
    return [values(one) for one in tree] if isinstance(tree, list) else tree.value


def _tree(node: yaml.Node, depth: int, count: Iterator[int]) -> Tree:
    if depth > MAX_DEPTH:  # also of an alias in its own anchor
        raise _error(node, f"values are nested more than {MAX_DEPTH} levels deep, with aliases expanded")
    if next(count) > MAX_VALUES:
        raise _error(node, f"the file has more than {MAX_VALUES} values, with aliases expanded")
    if isinstance(node, yaml.ScalarNode):
        construct = _CONSTRUCTORS.get(node.tag)
        return Scalar(node.value, construct(node) if construct else node.value, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_tree(item, depth + 1, count) for item in node.value]
    # Keys under `<<` come after the mapping's own keys and those of a later `<<`, like in PyYAML.
    tree: dict[str, Tree] = {}
    merged: list[list[Tree]] = []
    for key, item in node.value:
        value = _tree(item, depth + 1, count)
        if not isinstance(key, yaml.ScalarNode):
            raise _error(key, "a key is not a string")
        if key.tag == f"{_TAG}merge":
            merged.append(value if isinstance(value, list) else [value])
        elif key.value in tree:
            raise _error(key, f"the key {key.value!r} occurs twice in one mapping")
        else:
            tree[key.value] = value
    for base in itertools.chain.from_iterable(reversed(merged)):
        if not isinstance(base, dict):
            raise _error(node, "the value of << is not a mapping")
        for name, value in base.items():
            tree.setdefault(name, value)
    return tree


def _error(at: yaml.Event | yaml.Node, why: str) -> ValueError:
    return ValueError(f"line {at.start_mark.line + 1}: {why}")
