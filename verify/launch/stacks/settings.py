"""Asks a configuration for the settings that decide what is loaded, and remembers what it could not say."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.hub_cache import hub_model
from verify.issue import Issue
from verify.launch.settings.config import Config, UnresolvedError
from verify.launch.words import Word, is_new_at_start
from verify.report import Severity

TRUE, FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})
# What stands before a path of another machine.
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass
class Settings:
    """A configuration with a list of what it was asked for in vain: values that cannot be resolved, or are not local.

    `unread` has a line for each; the report is inconclusive where there is one. `stand_in` is the directory that the
    command line gives for the model of the keys `stands_for`; it counts before these. `files` are names of files that
    the launch takes settings from, `groups` the words that choose one of a folder (`engine=megatron`).
    """

    config: Config
    stand_in: Path | None = None
    stands_for: frozenset[str] = frozenset()
    files: Sequence[str] = ()
    groups: Sequence[Word] = ()
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _unresolved: set[str] = field(default_factory=set)

    def quietly(self) -> Settings:
        """The same settings with another list of what could not be resolved: for questions that nothing hangs on."""
        return Settings(self.config)

    def word(self, key: str) -> Word | None:
        """The value of a key; None where it is absent, null, a mapping, or cannot be resolved."""
        try:
            node = self.config.find(key)
        except UnresolvedError as reason:
            if key not in self._unresolved:
                self._unresolved.add(key)
                self.unread.append(f"{key}: {reason}")
            return None
        return node if isinstance(node, Word) else None

    def is_new(self, key: str) -> bool:
        """Whether a name has the time of the start in it, so that nothing of that name can be there yet."""
        try:
            self.config.find(key)
        except UnresolvedError as reason:
            return is_new_at_start(str(reason))
        return False

    def resolved(self, key: str) -> bool:
        """Whether the value of a key is known, be it that there is none."""
        self.word(key)
        return key not in self._unresolved

    def first(self, *keys: str) -> str:
        """The first of these keys that has a value; the last one if none has."""
        return next((key for key in keys if self.word(key) is not None), keys[-1])

    def text(self, key: str, default: str = "") -> str:
        """The value of a key, `default` where there is none."""
        word = self.word(key)
        return default if word is None else word.text

    def listed(self, key: str, default: str = "") -> str:
        """The values of a list with commas between them, or a value by itself; `default` where there is none."""
        return ", ".join(self.text(name) for name in self.config.names(key) if self.word(name)) or default

    def number(self, key: str, default: int | None = None) -> int | None:
        """A whole number; `default` where there is none; None where it cannot be resolved.

        Raises CkptkitError for a value that is not a number.
        """
        if not self.resolved(key):
            return None
        if (word := self.word(key)) is None:
            return default
        text = word.text.replace("_", "").removesuffix(".0")
        if not (text.isdecimal() and len(text) < 10):
            raise CkptkitError(f"{key}={word.text} ({word.place}) is not a number", "give the number that the job has")
        return int(text)

    def size(self, key: str, default: int | None = 1) -> int | None:
        """A number of ranks, as `number`. Raises CkptkitError for 0 too."""
        found = self.number(key, default)
        if found == 0:
            raise CkptkitError(f"{key}=0 is not a number of ranks", "give 1 or more, or leave it out")
        return found

    def switch(self, key: str, default: bool = False) -> bool:
        """A truth value, `default` where there is none or it cannot be resolved. Raises CkptkitError for another."""
        if (word := self.word(key)) is None:
            return default
        if word.text.lower() not in TRUE | FALSE:
            raise CkptkitError(f"{key}={word.text} ({word.place}) is neither true nor false", "give one of them")
        return word.text.lower() in TRUE

    def is_on(self, key: str) -> bool:
        """Whether a key is true for certain."""
        return self.text(key).lower() in TRUE

    def is_off(self, key: str) -> bool:
        """Whether a key is false, absent or null for certain."""
        return self.resolved(key) and (self.word(key) is None or self.text(key).lower() in FALSE)

    def above_zero(self, key: str, default: float = 0.0) -> bool:
        """Whether a number is above zero. Raises CkptkitError for a value that is not a number."""
        if (word := self.word(key)) is None:
            return default > 0
        try:
            return float(word.text) > 0
        except ValueError:
            raise CkptkitError(f"{key}={word.text} ({word.place}) is not a number", "give the number") from None

    def issue(self, keys: Sequence[str], expected: str, hint: str, severity: Severity = "warning") -> Issue:
        """An issue about these keys, the first of which names the file."""
        word = self.word(keys[0])
        actual = ", ".join(f"{key} = {self.text(key)} ({one.place})" for key in keys if (one := self.word(key)))
        return Issue(expected, actual, hint, file=word.file if word else None, severity=severity)

    def place(self, key: str) -> str:
        """`key (run.yaml:12)`, or the key alone where nothing says it."""
        word = self.word(key)
        return key if word is None else f"{key} ({word.place})"

    def model(self, key: str) -> Path | None:
        """The local directory of a model; None where there is none, with a line in `unread` that says why.

        A name on a hub is its snapshot in the local cache. Where that is not whole the trainer downloads it, and nobody
        can say here what it will hold. The directory of the command line counts before that of a setting, and a note
        says so.
        """
        stand_in = self.stand_in if key in self.stands_for else None
        before = len(self.unread)
        found = self._model(key)
        if stand_in is None:
            return found
        del self.unread[before:]
        if found and os.path.abspath(found) != os.path.abspath(stand_in):
            note = f"--hf-checkpoint {stand_in} was looked at, although {self.place(key)} says {found}"
            self.notes += [] if note in self.notes else [note]
        return stand_in

    def _model(self, key: str) -> Path | None:
        if not self.resolved(key):
            return None
        if (word := self.word(key)) is None:
            self._say(f"{key} is not given, so nothing says which model this is")
            return None
        if Path(word.text).exists():
            return Path(word.text)
        if _REMOTE.match(word.text):
            self._say(f"{self.place(key)} {word.text}: not on this machine; copy it here and give its directory")
            return None
        if (hub := hub_model(word.text, self.config.environment)) is None:
            return Path(word.text)
        if hub.path is None:
            hint = f"give a local copy of it{' as --hf-checkpoint' if key in self.stands_for else ''}"
            self._say(f"{self.place(key)} {word.text}: a name on a model hub, {hub.why}; {hint}")
        elif not hub.path.exists():
            note = f"{self.place(key)} is {hub.why}"
            self.notes += [] if note in self.notes else [note]
        return hub.path

    def not_looked_at(self, pattern: re.Pattern[str]) -> None:
        """Adds a line for every key that matches, is given, and neither false, empty nor null."""
        for key in self.config.names():
            if pattern.search(key) and (word := self.word(key)) and word.text.lower() not in ("false", "", "{}", "[]"):
                self._say(f"{self.place(key)} {word.text}: not looked at")

    def _say(self, line: str) -> None:
        if line not in self.unread:
            self.unread.append(line)
