"""The one exception that ckptkit raises on purpose: bad input, or something missing from the environment."""

from __future__ import annotations


class CkptkitError(Exception):
    """What is wrong (naming file and tensor) and, as `hint`, what to do next. The command line exits with code 2.

    `resumable`: whether the same job may end well another time, so that what it has finished is worth keeping.
    """

    resumable = True

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message


class UnsupportedError(CkptkitError):
    """A model or a format that is none of those that ckptkit reads. It says nothing of the checkpoint, which may be sound."""
