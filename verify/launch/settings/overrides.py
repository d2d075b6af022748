"""Overrides on a command line, as Hydra has them: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`, and the values in them.

Source: Hydra's override grammar, "Basic Override syntax" and "Extended Override syntax". A later override of a key
replaces an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptkit.verify.launch.settings.config import closing
from ckptkit.verify.launch.settings.tree import NULL, Tree, merged_settings
from ckptkit.verify.launch.words import UnresolvedWord, Word

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/:-]*?(?:\[\d+\])*)(?:=(.*))?", re.DOTALL)


def is_override(text: str) -> bool:
    """Whether a word has the form of an override."""
    match = _OVERRIDE.fullmatch(text)
    return match is not None and (match[3] is not None or match[1] == "~")


def apply_overrides(
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


def _with(tree: Mapping[str, Tree], keys: list[str], value: Tree) -> dict[str, Tree]:
    first, rest = keys[0], keys[1:]
    if not rest:
        before = tree.get(first)
        # Hydra merges a mapping into one that is there; a list replaces a list.
        return {
            **tree,
            first: merged_settings(before, value) if isinstance(before, dict) and isinstance(value, dict) else value,
        }
    below = tree.get(first)
    if isinstance(below, list):
        below = {str(index): one for index, one in enumerate(below)}
    return {**tree, first: _with(below if isinstance(below, dict) else {}, rest, value)}


def _without(tree: Mapping[str, Tree], keys: list[str]) -> dict[str, Tree]:
    first, rest = keys[0], keys[1:]
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    below = tree.get(first)
    return {**tree, first: _without(below, rest)} if isinstance(below, dict) else dict(tree)


# Characters of a primitive, and those that a backslash may stand before.
_PLAIN = re.compile(r"[A-Za-z0-9_/\-\\+.$%*@?|: \t]")
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
_KEY = re.compile(r"[A-Za-z0-9_/\-+.$%*@?|]+")
# Hydra's functions. Other calls are text for ROLL, such as `list(range(0,8))`; Hydra itself stops at them.
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\(")
_FUNCTIONS = frozenset(
    {
        *("bool", "choice", "extend_list", "float", "glob", "int", "interval", "json_str", "range", "shuffle", "sort"),
        *("str", "tag"),
    }
)
_MAX_DEPTH = 20
_Entry = TypeVar("_Entry")


class _RefusedError(Exception):
    """A text that Hydra does not take, or that stands for several jobs, and why."""


def hydra_value(text: str, word: Word) -> Tree:
    """What Hydra makes of the text of a value; a word that is not known where it refuses it, or would call a function.

    `word` is the whole override, whose place each part keeps.
    """
    called = _CALL.match(text)
    if isinstance(word, UnresolvedWord) or (called and called[1] not in _FUNCTIONS):
        return replace(word, text=text.strip())
    reader = _Reader(text, word)
    try:
        tree = reader.element(0)
        if reader.blanks() and reader.position < len(text):
            more = ", which makes it several jobs" if text[reader.position] == "," else ""
            raise _RefusedError(f"unexpected {text[reader.position]!r}{more}")
    except _RefusedError as reason:
        return UnresolvedWord(word.text, word.file, word.line, f"Hydra does not take this value: {reason}")
    return tree


@dataclass
class _Reader:
    """A position in the text of a value."""

    text: str
    word: Word
    position: int = 0

    def blanks(self) -> bool:
        while self.peek() in (" ", "\t"):
            self.position += 1
        return True

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def element(self, depth: int) -> Tree:
        if depth > _MAX_DEPTH:
            raise _RefusedError("it is nested too deeply")
        self.blanks()
        if self.peek() == "{":
            return dict(self.entries("}", lambda: self.pair(depth + 1)))
        if self.peek() == "[":
            return list(self.entries("]", lambda: self.element(depth + 1)))
        return self.quoted() if self.peek() and self.peek() in "'\"" else self.primitive()

    def entries(self, end: str, entry: Callable[[], _Entry]) -> Iterator[_Entry]:
        """What stands between commas up to a bracket, each read by `entry`."""
        self.position += 1
        self.blanks()
        while self.peek() != end:
            yield entry()
            self.blanks()
            if self.peek() != ",":
                break
            self.position += 1
            self.blanks()
            if self.peek() == end:
                raise _RefusedError(f"a comma before {end!r}")
        self.expect(end)

    def pair(self, depth: int) -> tuple[str, Tree]:
        key = _KEY.match(self.text, self.position)
        if key is None:
            raise _RefusedError("a mapping with a key that is no key")
        self.position = key.end()
        self.blanks()
        self.expect(":")
        return key[0], self.element(depth)

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise _RefusedError(f"no {character!r}")
        self.position += 1

    def quoted(self) -> Word:
        """Text in quotes; a backslash counts before a quote of the same kind only."""
        quote = self.peek()
        found = re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL).match(self.text, self.position)
        if found is None:
            raise _RefusedError("a quote that is never closed")
        self.position = found.end()
        text = re.sub(rf"(\\+)({quote}|$)", lambda one: "\\" * (len(one[1]) // 2) + one[2], found[1])
        if text == NULL:
            return self.unknown("the text `null`, which is not null")
        return replace(self.word, text=text)

    def primitive(self) -> Word:
        """Text without quotes; `null` is null."""
        text, last = "", 0
        while self.position < len(self.text):
            if found := _ESCAPED.match(self.text, self.position):
                text, self.position = text + found[1], found.end()
                last = len(text)
            elif self.text.startswith("${", self.position):
                text += self.interpolation()
                last = len(text)
            elif _PLAIN.match(self.text, self.position):
                text += self.peek()
                last = last if self.peek() in " \t" else len(text)
                self.position += 1
            else:
                break
        if self.peek() == "(":
            raise _RefusedError("the call of a function")
        text = text[:last]
        if not text:
            return self.unknown("an empty text, which is not null")
        return replace(self.word, text=NULL if text.lower() == NULL else text)

    def unknown(self, why: str) -> Word:
        return UnresolvedWord(self.word.text, self.word.file, self.word.line, why)

    def interpolation(self) -> str:
        start = self.position
        self.position = closing(self.text, start + 2) + 1
        if not self.position:
            raise _RefusedError("${ that is never closed")
        return self.text[start : self.position]
