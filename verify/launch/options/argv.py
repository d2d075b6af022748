"""A command line as argparse splits it up: options in their order, each with the words that follow it as values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptkit.verify.launch.words import UnresolvedWord, Word

# What argparse takes for a value although it begins with a dash.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


@dataclass(frozen=True)
class Option:
    """One option of a command line, as it is written.

    name: `--load`, without what follows a `=`.
    word: the word that the option stands in.
    values: the words behind it, up to the next option; of `--name=value` that value alone.
    """

    name: str
    word: Word
    values: tuple[Word, ...] = ()

    @property
    def value(self) -> Word | None:
        """The value of an option that takes one; None where it is missing, at which argparse stops."""
        return self.values[0] if self.values else None

    @property
    def known(self) -> bool:
        """Whether option and value could be told."""
        return not isinstance(self.word, UnresolvedWord) and not isinstance(self.value, UnresolvedWord)


def options_of(words: Sequence[Word]) -> tuple[Option, ...]:
    """The options among words, as a parser of argparse without abbreviations reads them.

    A `--` is passed over: it stands before the trainer's command, as in `ray job submit -- python3 train.py --load`.
    """
    found: list[Option] = []
    for word in words:
        if word.text == "--":
            continue
        if _is_option(word):
            name, equals, value = word.text.partition("=")
            found.append(Option(name, word, (_value(word, value),) if equals else ()))
        elif found and "=" not in found[-1].word.text:
            found[-1] = replace(found[-1], values=(*found[-1].values, word))
    return tuple(found)


def last(options: Iterable[Option], *names: str) -> Option | None:
    """The one of these options that counts, which is the last; None where none is given."""
    return next((one for one in reversed(tuple(options)) if one.name in names), None)


def _value(word: Word, text: str) -> Word:
    return word if isinstance(word, UnresolvedWord) else replace(word, text=text)


def _is_option(word: Word) -> bool:
    """Whether argparse takes a word for an option, be it one that it does not know."""
    if isinstance(word, UnresolvedWord):
        return word.text.startswith("--")
    name = word.text.partition("=")[0]
    return name.startswith("-") and name != "-" and " " not in name and not _NEGATIVE.fullmatch(word.text)
