"""The text of a launch, read and never run: its words, its variables, and its unresolved parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.verify.core.issue import Issue


@dataclass(frozen=True)
class Word:
    """One word of a launch, and its file and line."""

    text: str
    file: Path | None = None
    line: int | None = None

    @property
    def place(self) -> str:
        """`run.sh:12` for a word of a file, else `the command line`."""
        if self.file is None:
            return "the command line"
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"


def at_places(words: Mapping[str, Word]) -> str:
    """`places_of` in brackets, ` (tp and pp at line 12, ep at line 13)`, or "" if no word has a file."""
    return f" ({text})" if (text := places_of(words)) else ""


def places_of(words: Mapping[str, Word]) -> str:
    """`tp and pp at line 12, ep at line 13`. Files other than the first are named by their path."""
    places: dict[str, list[str]] = {}
    for name, word in words.items():
        if word.file:
            at = f"line {word.line}" if word.line and word.file == first_file(words) else word.place
            places.setdefault(at, []).append(name)
    return ", ".join(f"{' and '.join(names)} at {at}" for at, names in places.items())


def first_file(words: Mapping[str, Word]) -> Path | None:
    """The file of the first word that has one."""
    return next((word.file for word in words.values() if word.file), None)


UNSET = "set neither in the script nor in the environment"  # the reason why a variable is unknown


@dataclass(frozen=True)
class UnresolvedWord(Word):
    """The source text of a word that could not be resolved."""

    why: str = ""
    anything: bool = False  # it may become any number of words, options among them


@dataclass(frozen=True)
class LaunchText:
    """The text of a launch, read and never run. Nothing is guessed."""

    words: tuple[Word, ...] = ()  # the options of the trainer in their order: `--num-layers`, `36` ...
    environment: Mapping[str, Word] = field(default_factory=dict)  # as the trainer will see it
    unresolved: tuple[str, ...] = ()  # a line for each part that could not be resolved
    issues: tuple[Issue, ...] = ()  # faults of the text itself, such as a lost line continuation
    program: str = ""  # the trainer's file or module, or "" if unknown
    ranks: Word | None = None  # the number of processes that torchrun, deepspeed or accelerate starts
    directory: Path | None = None  # the working directory of the program, or None if unknown

    @property
    def program_name(self) -> str:
        """The file or module that starts the trainer, `train_async.py`, or "" if unknown."""
        named = self.program or next((word.text for word in known_words(self.words) if word.text.endswith(".py")), "")
        return named.rpartition("/")[2]


# Text that changes at every start, to the minute or better: `$(date +%H%M)`, `datetime.now()`.
_AT_START = re.compile(
    r"\bdate\b[^)]*%(?:[HMSsTNXcR]|-[HM])|\$\(date\)|datetime\..*now\(|time\.time\(|\brandom\.|\buuid"
)


class UnfollowedCall(str):
    """The reason why a value is unknown: ckptkit does not follow the call in this text."""


def changes_every_start(text: str) -> bool:
    """Whether a name contains the start time or a random part, so that nothing of that name can exist yet."""
    return _AT_START.search(text) is not None


def known_words(words: Sequence[Word]) -> list[Word]:
    """The resolved words, without options that have an unresolved value."""
    known: list[Word] = []
    before: Word | None = None
    for word in words:
        if not isinstance(word, UnresolvedWord):
            known.append(word)
        elif known and known[-1] is before and before.text.startswith("--") and not word.text.startswith("--"):
            # The unresolved value of the option before it.
            known = known if word.anything else known[:-1]
        before = word
    return known
