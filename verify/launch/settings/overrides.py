"""Hydra overrides on a command line, `a.b=c`, `+a.b=c`, `++a.b=c` and `~a.b`, and the values in them.

Source: Hydra's override grammar, "Basic Override syntax" and "Extended Override syntax".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptkit.verify.launch.settings.config import closing
from ckptkit.verify.launch.settings.tree import NULL, Tree, merge_settings
from ckptkit.verify.launch.words import UnresolvedWord, Word

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/:-]*?(?:\[\d+\])*)(?:=(.*))?", re.DOTALL)


def is_override(text: str) -> bool:
    """Whether a word has the form of an override."""
    match = _OVERRIDE.fullmatch(text)
    return match is not None and (match[3] is not None or match[1] == "~")


def apply_overrides(
    tree: Mapping[str, Tree], words: Iterable[Word], is_group: Callable[[str], bool] = lambda _: False
) -> tuple[dict[str, Tree], list[Word]]:
    """A tree after the overrides among these words, in order, and the overrides that select another file of a group.

    The latter are `group@key=file`, `group/key=file` and, for a name with `is_group`, `group=file`.
    """
    changed, groups = dict(tree), []
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
            why = "Hydra accepts neither an index in brackets nor the removal of list elements"
            changed = {**changed, keys[0]: UnresolvedWord(word.text, word.file, word.line, why)}
            continue
        is_section = len(keys) == 1 and (isinstance(changed.get(keys[0]), dict) or is_group(keys[0]))
        if is_section and match[1] != "~" and isinstance(value, Word) and value.text != NULL:
            groups.append(word)
            continue
        changed = _remove(changed, *keys) if match[1] == "~" else _set(changed, value, *keys)
    return changed, groups


def _set(tree: Mapping[str, Tree], value: Tree, first: str, *keys: str) -> dict[str, Tree]:
    below = tree.get(first)
    if not keys:
        return merge_settings(tree, {first: value})  # a mapping is merged, a list is replaced
    if isinstance(below, list):
        below = {str(index): item for index, item in enumerate(below)}
    return {**tree, first: _set(below if isinstance(below, dict) else {}, value, *keys)}


def _remove(tree: Mapping[str, Tree], first: str, *keys: str) -> dict[str, Tree]:
    if not keys:
        return {key: value for key, value in tree.items() if key != first}
    below = tree.get(first)
    return {**tree, first: _remove(below, *keys)} if isinstance(below, dict) else dict(tree)


# Characters of a primitive, and characters that a backslash may escape.
_PLAIN = re.compile(r"[A-Za-z0-9_/\-\\+.$%*@?|: \t]")
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
_KEY = re.compile(r"[A-Za-z0-9_/\-+.$%*@?|]+")
# Hydra's functions. ROLL reads other calls as text, such as `list(range(0,8))`; Hydra itself refuses them.
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\(")
_FUNCTIONS = re.compile("bool|choice|extend_list|float|glob|int|interval|json_str|range|shuffle|sort|str|tag")
_MAX_DEPTH = 20
_Entry = TypeVar("_Entry")


class _RefusedError(Exception):
    """Hydra does not accept a value, or makes several jobs of it; the message is the reason."""


def hydra_value(text: str, word: Word) -> Tree:
    """Parses a value as Hydra does, with words at the place of `word`; an UnresolvedWord if Hydra refuses it."""
    call = _CALL.match(text)
    if isinstance(word, UnresolvedWord) or (call and not _FUNCTIONS.fullmatch(call[1])):
        return replace(word, text=text.strip())
    parser = _ValueParser(text, word)
    try:
        tree = parser.element(0)
        parser.skip_blanks()
        if parser.peek():
            why = ", which makes it several jobs" if parser.peek() == "," else ""
            raise _RefusedError(f"unexpected {parser.peek()!r}{why}")
    except _RefusedError as reason:
        return parser.unknown(f"Hydra does not accept this value: {reason}")
    return tree


@dataclass
class _ValueParser:
    """A position in the text of a value."""

    text: str
    word: Word
    position: int = 0

    def skip_blanks(self) -> None:
        while self.peek() in (" ", "\t"):
            self.position += 1

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def element(self, depth: int) -> Tree:
        if depth > _MAX_DEPTH:
            raise _RefusedError("it is nested too deeply")
        self.skip_blanks()
        if self.peek() == "{":
            return dict(self.entries("}", lambda: self.pair(depth + 1)))
        if self.peek() == "[":
            return list(self.entries("]", lambda: self.element(depth + 1)))
        return self.quoted() if self.peek() and self.peek() in "'\"" else self.primitive()

    def entries(self, end: str, entry: Callable[[], _Entry]) -> Iterator[_Entry]:
        self.position += 1
        self.skip_blanks()
        while self.peek() != end:
            yield entry()
            self.skip_blanks()
            if self.peek() != ",":
                break
            self.position += 1
            self.skip_blanks()
            if self.peek() == end:
                raise _RefusedError(f"a comma before {end!r}")
        self.expect(end)

    def pair(self, depth: int) -> tuple[str, Tree]:
        key = _KEY.match(self.text, self.position)
        if key is None:
            raise _RefusedError("a mapping with an invalid key")
        self.position = key.end()
        self.skip_blanks()
        self.expect(":")
        return key[0], self.element(depth)

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise _RefusedError(f"no {character!r}")
        self.position += 1

    def quoted(self) -> Word:
        """Text in quotes; a backslash is special only before a quote of the same kind."""
        quote = self.peek()
        match = re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL).match(self.text, self.position)
        if match is None:
            raise _RefusedError("a quote that is never closed")
        self.position = match.end()
        text = re.sub(rf"(\\+)({quote}|$)", lambda found: "\\" * (len(found[1]) // 2) + found[2], match[1])
        return self.unknown("the text `null`, which is not null") if text == NULL else replace(self.word, text=text)

    def primitive(self) -> Word:
        """Text without quotes; `null` is null."""
        text, end = "", 0  # `end` is before blanks at the end
        while self.position < len(self.text):
            is_blank = self.peek() in " \t"
            if match := _ESCAPED.match(self.text, self.position):
                text, self.position = text + match[1], match.end()
            elif self.text.startswith("${", self.position):
                text += self.interpolation()
            elif match := _PLAIN.match(self.text, self.position):
                text, self.position = text + match[0], match.end()
            else:
                break
            end = end if is_blank else len(text)
        if self.peek() == "(":
            raise _RefusedError("the call of a function")
        text = text[:end]
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
