"""Overrides on a command line, as Hydra has them: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`.

Source: Hydra's override grammar. A later override of a key replaces an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from verify.launch.settings.config import merged
from verify.launch.settings.hydra_value import hydra_value
from verify.launch.settings.yaml_tree import NULL, Tree
from verify.launch.words import UnresolvedWord, Word

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/:-]*?(?:\[\d+\])*)(?:=(.*))?", re.DOTALL)


def is_override(text: str) -> bool:
    """Whether a word has the form of an override."""
    match = _OVERRIDE.fullmatch(text)
    return match is not None and (match[3] is not None or match[1] == "~")


def applied(
    tree: Mapping[str, Tree], words: Iterable[Word], is_group: Callable[[str], bool] = lambda _: False
) -> tuple[dict[str, Tree], list[Word]]:
    """A tree with the overrides among these words, and those that choose another file of a group.

    These are `group@key=file`, `group/key=file` and, where `is_group` holds of a name, `group=file`.
    """
    found, groups = dict(tree), []
    for word in words:
        match = _OVERRIDE.fullmatch(word.text) if is_override(word.text) else None
        if match is None:
            continue
        if "@" in match[2] or "/" in match[2]:
            groups.append(word)
            continue
        keys = match[2].replace("[", ".").replace("]", "").split(".")
        value = hydra_value(match[3] or "", word)
        if "[" in match[2] or (match[1] == "~" and keys[-1].isdecimal()):
            why = "Hydra neither reads an index in brackets nor takes elements out of a list"
            found = {**found, keys[0]: UnresolvedWord(word.text, word.file, word.line, why)}
            continue
        section = len(keys) == 1 and (isinstance(found.get(keys[0]), dict) or is_group(keys[0]))
        if section and match[1] != "~" and isinstance(value, Word) and value.text != NULL:
            groups.append(word)
            continue
        found = _without(found, keys) if match[1] == "~" else _with(found, keys, value)
    return found, groups


def flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Word]]:
    """Every word with its dotted key."""
    if isinstance(tree, Word):
        yield prefix, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else key)
    else:
        for index, value in enumerate(tree):
            yield from flat(value, f"{prefix}.{index}" if prefix else str(index))


def _with(tree: Mapping[str, Tree], keys: list[str], value: Tree) -> dict[str, Tree]:
    first, rest = keys[0], keys[1:]
    if not rest:
        before = tree.get(first)
        # Hydra merges a mapping into one that is there; a list replaces a list.
        return {**tree, first: merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value}
    below = tree.get(first)
    return {**tree, first: _with(_mapping(below), rest, value)}


def _mapping(node: Tree | None) -> Mapping[str, Tree]:
    if isinstance(node, list):
        return {str(index): one for index, one in enumerate(node)}
    return node if isinstance(node, dict) else {}


def _without(tree: Mapping[str, Tree], keys: list[str]) -> dict[str, Tree]:
    first, rest = keys[0], keys[1:]
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    below = tree.get(first)
    return {**tree, first: _without(below, rest)} if isinstance(below, dict) else dict(tree)
