"""The settings of a job as a rule asks for them.

One whose value is not known breaks no rule, and makes no report inconclusive.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.core.errors import CkptkitError
from verify.issue import Issue
from verify.launch.stacks.settings import FALSE, TRUE, Settings
from verify.launch.words import Word
from verify.report import Severity


class Values:
    """The settings of a job of verl, NeMo-RL or ROLL."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.quietly()
        self.environment = settings.config.environment

    def word(self, key: str) -> Word | None:
        """The value of a key as it is written; None where it is absent, null or not known."""
        return self._settings.word(key)

    def off(self, key: str) -> bool:
        """Whether a key is absent or null for certain."""
        return self._settings.resolved(key) and self.word(key) is None

    def number(self, key: str, default: int | None = None) -> int | None:
        """A whole number; `default` where there is none; None for what is not known, or is none."""
        try:
            return self._settings.number(key, default)
        except CkptkitError:
            return None

    def decimal(self, key: str, default: float | None = None) -> float | None:
        """A number, as `number`."""
        if self.off(key):
            return default
        word = self.word(key)
        try:
            return None if word is None else float(word.text)
        except ValueError:
            return None

    def on(self, key: str, default: bool | None = False) -> bool | None:
        """A truth value; `default` where there is none; None for what is not known, or is none."""
        if self.off(key):
            return default
        text = (self.text(key) or "").lower()
        return True if text in TRUE else False if text in FALSE else None

    def text(self, key: str, default: str | None = None) -> str | None:
        """The text of a key; `default` where there is none; None for what is not known."""
        if self.off(key):
            return default
        word = self.word(key)
        return None if word is None else word.text

    def issue(self, keys: Sequence[str], expected: str, hint: str, severity: Severity = "error") -> Issue:
        """What is wrong with these keys, the first of which that is written gives the file."""
        words = [word for key in keys if (word := self.word(key)) is not None]
        actual = ", ".join(self._said(key) for key in keys)
        return Issue(expected, actual, hint, file=words[0].file if words else None, severity=severity)

    def _said(self, key: str) -> str:
        word = self.word(key)
        return f"no {key}" if word is None else f"{key} = {word.text} ({word.place})"
