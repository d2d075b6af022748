"""What a launch says, read and never run: its words, its variables, and what could not be made out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.verify.core.issue import Issue


@dataclass(frozen=True)
class Word:
    """One word of a launch, and where it is written."""

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
    """` (tp and pp at line 12, ep at line 13)`: `places_of` in brackets; nothing for no file."""
    return f" ({text})" if (text := places_of(words)) else ""


def places_of(words: Mapping[str, Word]) -> str:
    """`tp and pp at line 12, ep at line 13` of the first file, with its path for another; nothing for no file."""
    places: dict[str, list[str]] = {}
    for name, word in words.items():
        if word.file:
            at = f"line {word.line}" if word.line and word.file == first_file(words) else word.place
            places.setdefault(at, []).append(name)
    return ", ".join(f"{' and '.join(names)} at {at}" for at, names in places.items())


def first_file(words: Mapping[str, Word]) -> Path | None:
    """The first file that one of these words stands in."""
    return next((word.file for word in words.values() if word.file), None)


@dataclass(frozen=True)
class UnresolvedWord(Word):
    """A word that is not known, as it is written, and why. `anything`: it may be any number of words, options too."""

    why: str = ""
    anything: bool = False


@dataclass(frozen=True)
class LaunchText:
    """What a launch says, read and never run.

    `words` are options of Megatron-LM, slime and miles in their order: `--num-layers`, `36` ... `environment` holds
    the variables that the trainer will see. `unresolved` has a line for everything that could not be resolved, which is
    never guessed. `issues` are what is wrong with the text itself, such as a lost line continuation. `program` is the
    word that names the trainer's file or module, "" where it is not known. `ranks` is the number of processes that
    torchrun, deepspeed or accelerate starts, at its place, or None if the launch does not give it. `directory` is where
    the program is started, or None if that is not known.
    """

    words: tuple[Word, ...] = ()
    environment: Mapping[str, Word] = field(default_factory=dict)
    unresolved: tuple[str, ...] = ()
    issues: tuple[Issue, ...] = ()
    program: str = ""
    ranks: Word | None = None
    directory: Path | None = None

    @property
    def program_name(self) -> str:
        """The file or module that starts the trainer, `train_async.py`; "" where it is not known."""
        named = self.program or next((word.text for word in known_words(self.words) if word.text.endswith(".py")), "")
        return named.rpartition("/")[2]


# What gives another text at every start, to the minute or better: `$(date +%H%M)`, `datetime.now()`.
_AT_START = re.compile(
    r"\bdate\b[^)]*%(?:[HMSsTNXcR]|-[HM])|\$\(date\)|datetime\..*now\(|time\.time\(|\brandom\.|\buuid"
)


def changes_every_start(text: str) -> bool:
    """Whether a name has the time of the start, or a random part, in it: what it names cannot be there yet."""
    return _AT_START.search(text) is not None


def known_words(words: Sequence[Word]) -> list[Word]:
    """The words without those that are not known, and without the options whose values those are."""
    known: list[Word] = []
    before: Word | None = None
    for word in words:
        if not isinstance(word, UnresolvedWord):
            known.append(word)
        elif known and known[-1] is before and before.text.startswith("--") and not word.text.startswith("--"):
            # A value whose option is the word before it.
            known = known if word.anything else known[:-1]
        before = word
    return known
