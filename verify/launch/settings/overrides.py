"""Overrides on a command line, as Hydra has them: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`.

Source: Hydra's override grammar. A later override of a key replaces an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ckptkit.core.errors import CkptkitError
from verify.launch.settings.yaml_tree import NULL, Tree, parse
from verify.launch.words import Word

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/:-]*?(?:\[\d+\])*)(?:=(.*))?", re.DOTALL)
_MAPPING = re.compile(r"\{(?:[^{}'\"$]|\{\})*\}", re.DOTALL)


def is_override(text: str) -> bool:
    """Whether a word has the form of an override."""
    match = _OVERRIDE.fullmatch(text)
    return match is not None and (match[3] is not None or match[1] == "~")


def applied(tree: Mapping[str, Tree], words: Iterable[Word]) -> tuple[dict[str, Tree], list[Word]]:
    """A tree with the overrides among these words, and those that choose another file of a group (`group@key=file`)."""
    found, groups = dict(tree), []
    for word in words:
        match = _OVERRIDE.fullmatch(word.text) if is_override(word.text) else None
        if match is None:
            continue
        if "@" in match[2] or "/" in match[2]:
            groups.append(word)
            continue
        keys = match[2].replace("[", ".").replace("]", "").split(".")
        found = _without(found, keys) if match[1] == "~" else _with(found, keys, _value(match[3], word))
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


def _value(text: str, word: Word) -> Tree:
    """The value of an override. A mapping without quotes or interpolations becomes one; other text stays as it is."""
    text = text.strip()
    if _MAPPING.fullmatch(text):
        try:
            return _placed(parse(re.sub(r":(?=\S)", ": ", text)), word)
        except CkptkitError:
            return replace(word, text=text)  # text in braces, which is a value too
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        quote = text[0]
        return replace(word, text=text[1:-1].replace(f"\\{quote}", quote))
    return replace(word, text=NULL if text in ("null", "") else text)


def _placed(tree: Tree, word: Word) -> Tree:
    if isinstance(tree, dict):
        return {key: _placed(value, word) for key, value in tree.items()}
    return [_placed(one, word) for one in tree] if isinstance(tree, list) else replace(word, text=tree.text)


def _with(tree: Mapping[str, Tree], keys: list[str], value: Tree) -> dict[str, Tree]:
    first, rest = keys[0], keys[1:]
    if not rest:
        return {**tree, first: value}
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
