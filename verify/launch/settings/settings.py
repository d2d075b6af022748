"""The settings of a launch by key: options of a command line, or keys of YAML files and overrides."""

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
    """The value of one key."""

    value: Any = None  # None if the key is absent, null or unknown
    word: Word | None = None  # the word that sets the key
    known: bool = True

    @property
    def where(self) -> str:
        """`run.sh:12`, or "" if the key is not set."""
        return self.word.place if self.word else ""

    @property
    def file(self) -> Path | None:
        """The file that sets the key."""
        return self.word.file if self.word else None


class Settings:
    """The settings of a launch, by key: `num_layers` of a command line, `policy.model_name` of a YAML file."""

    def get(self, key: str) -> SettingValue:
        """The value of a key."""
        raise NotImplementedError

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, `default` if the key is certainly not set, or None if that is unknown."""
        setting = self.get(key)
        return None if not setting.known else default if setting.value is None else setting.value

    def has(self, key: str) -> bool:
        """Whether a key is certainly set, and not false."""
        setting = self.get(key)
        return setting.word is not None and setting.value is not False

    def lacks(self, key: str) -> bool:
        """Whether a key is certainly not set."""
        return self.get(key).known and not self.has(key)

    def issue(self, keys: Sequence[str], expected: str, hint: str, severity: Severity = "error") -> Issue:
        """An issue about these keys, in the file of the first one that is set."""
        file = next((setting.file for setting in map(self.get, keys) if setting.word), None)
        return Issue(expected, ", ".join(filter(None, map(self._format, keys))), hint, file=file, severity=severity)

    def cite(self, key: str) -> str:
        """`key (run.yaml:12)`, or only the key if it is not set."""
        where = self.get(key).where
        return f"{self.name(key)} ({where})" if where else self.name(key)

    def name(self, key: str) -> str:
        """A key as a launch writes it."""
        return key

    def _format(self, key: str) -> str:
        setting = self.get(key)
        return f"{self.name(key)} = {setting.value} ({setting.where})" if setting.word else ""
