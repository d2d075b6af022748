"""Splits a command line as argparse does: options in order, each with the words after it as values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptkit.verify.launch.words import UnresolvedWord, Word

_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # a value for argparse, although it begins with a dash


@dataclass(frozen=True)
class Option:
    """One option of a command line."""

    name: str  # `--load`, without `=value`
    word: Word  # with the option, and with the value of `--name=value`
    values: tuple[Word, ...] = ()  # the words up to the next option, or the value of `--name=value`

    @property
    def value(self) -> Word | None:
        """The first value, or None if it is missing."""
        return self.values[0] if self.values else None

    @property
    def known(self) -> bool:
        """Whether the option and its value are known."""
        return not isinstance(self.word, UnresolvedWord) and not isinstance(self.value, UnresolvedWord)


def options_of(words: Sequence[Word]) -> tuple[Option, ...]:
    """The options among words, as argparse without abbreviations reads them; skips `--`, as in `ray job submit --`."""
    options: list[Option] = []
    for word in words:
        if word.text == "--":
            continue
        if _is_option(word):
            name, equals, text = word.text.partition("=")
            value = word if isinstance(word, UnresolvedWord) else replace(word, text=text)
            options.append(Option(name, word, (value,) if equals else ()))
        elif options and "=" not in options[-1].word.text:
            options[-1] = replace(options[-1], values=(*options[-1].values, word))
    return tuple(options)


def last(options: Iterable[Option], *names: str) -> Option | None:
    """The last option with one of these names, which overrides the earlier ones."""
    return next((option for option in reversed(tuple(options)) if option.name in names), None)


def _is_option(word: Word) -> bool:
    """Whether argparse reads a word as an option, even an unknown one."""
    if isinstance(word, UnresolvedWord):
        return word.text.startswith("--")
    name = word.text.partition("=")[0]
    return name.startswith("-") and name != "-" and " " not in name and not _NEGATIVE.fullmatch(word.text)
