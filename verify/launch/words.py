"""What a launch says, read and never run: its words, its variables, and what could not be made out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verify.issue import Issue


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


@dataclass(frozen=True)
class UnresolvedWord(Word):
    """A word that is not known, as it is written, and why. `anything`: it may be any number of words, options too."""

    why: str = ""
    anything: bool = False


@dataclass(frozen=True)
class LaunchText:
    """What a launch says, read and never run.

    `words` are options of Megatron-LM, slime and miles in their order: `--num-layers`, `36` ... `environment` holds
    the variables that the trainer will see, `overrides` the settings of verl, NeMo-RL and ROLL by dotted key.
    `unresolved` has a line for everything that could not be resolved, which is never guessed. `issues` are what is
    wrong with the text itself, such as a lost line continuation. `program` is the word that names the trainer's file
    or module, "" where it is not known.
    """

    words: tuple[Word, ...] = ()
    environment: Mapping[str, Word] = field(default_factory=dict)
    unresolved: tuple[str, ...] = ()
    issues: tuple[Issue, ...] = ()
    overrides: Mapping[str, Word] = field(default_factory=dict)
    program: str = ""


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
