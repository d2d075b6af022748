"""What a launch sets, by key: the options of a command line, or the keys of YAML files and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import Severity
from ckptkit.verify.launch.words import Word


@dataclass(frozen=True)
class SettingValue:
    """What a launch gives to one key.

    value: None where the launch gives nothing or null, and where it is not known.
    word: the word that gives it, or None if there is none.
    known: whether it could be told what the launch gives.
    """

    value: Any = None
    word: Word | None = None
    known: bool = True

    @property
    def where(self) -> str:
        """`run.sh:12`; "" where nothing is given."""
        return self.word.place if self.word else ""

    @property
    def file(self) -> Path | None:
        """The file in which it is written."""
        return self.word.file if self.word else None


class Settings:
    """The settings of a launch, by key: `num_layers` of a command line, `policy.model_name` of a YAML file."""

    def get(self, key: str) -> SettingValue:
        """What the launch gives to a key."""
        raise NotImplementedError

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, `default` where it is certain that it is not given; None where it is not known."""
        found = self.get(key)
        return None if not found.known else default if found.value is None else found.value

    def has(self, key: str) -> bool:
        """Whether it is certain that a key is given, and not false."""
        found = self.get(key)
        return found.word is not None and found.value is not False

    def lacks(self, key: str) -> bool:
        """Whether it is certain that a key is not given."""
        return self.get(key).known and not self.has(key)

    def issue(self, keys: Sequence[str], expected: str, hint: str, severity: Severity = "error") -> Issue:
        """What is wrong with these keys, the first of which that is given names the file."""
        file = next((found.file for found in map(self.get, keys) if found.word), None)
        actual = ", ".join(filter(None, map(self._written, keys)))
        return Issue(expected, actual, hint, file=file, severity=severity)

    def cite(self, key: str) -> str:
        """`key (run.yaml:12)`, or the key alone where nothing gives it."""
        where = self.get(key).where
        return f"{self.name(key)} ({where})" if where else self.name(key)

    def name(self, key: str) -> str:
        """A key as a launch writes it."""
        return key

    def _written(self, key: str) -> str:
        """A key with its value, and where that is written; "" for none."""
        found = self.get(key)
        return f"{self.name(key)} = {found.value} ({found.where})" if found.word else ""
