"""The one exception that ckptkit raises on purpose, and how those of other libraries are put into its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from ckptkit.core.printable import one_line, printable

ErrorCode = Literal[
    "usage",  # options or arguments are wrong, or contradict one another
    "unsupported",  # a model or format that ckptkit does not read; the checkpoint may be sound
    "missing",  # a file, a part of a checkpoint, or the checkpoint itself is not there
    "damaged",  # a file is cut short, is not what its name says, or contradicts another of its checkpoint
    "storage",  # a remote store did not answer, or refused
    "missing-dependency",  # a library has to be installed first
    "changed",  # files were written while they were read
    "mismatch",  # weights were compared, and differ
    "other",  # none of these: the message says what is wrong
]


class CkptkitError(Exception):
    """A fault (naming file and tensor) and, as `hint`, what to do next, each on one line. The exit code is 2.

    `details`: faults one by one, which `message` has too, and which are printed on lines of their own.
    `code`: the kind of error, for programs; codes do not change, messages do.
    `resumable`: the same job may end well another time, so that what it has finished is worth keeping.
    """

    code: ErrorCode = "other"
    resumable = True

    def __init__(
        self, message: str, hint: str | None = None, details: Sequence[str] = (), *, code: ErrorCode | None = None
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.message = f"{message}: {'; '.join(details)}" if details else message
        self.hint = hint
        self.details = tuple(details)

    def __str__(self) -> str:
        # Names of a checkpoint are in all of it, and a notebook prints them as a terminal does.
        lines = [f"{self.args[0]}:", *self.details] if self.details else [self.message]
        return "\n  ".join(map(printable, [*lines, f"next: {self.hint}"] if self.hint else lines))


class UsageError(CkptkitError):
    """Options or arguments are wrong, or contradict one another."""

    code = "usage"


class MissingDependencyError(CkptkitError):
    """A library has to be installed first."""

    code = "missing-dependency"


class MissingError(CkptkitError):
    """A file, a part of a checkpoint, or the checkpoint itself is not there."""

    code = "missing"


class DamagedError(CkptkitError):
    """A file is cut short, is not what its name says, or contradicts another of its checkpoint."""

    code = "damaged"

    def __init__(self, message: str, hint: str | None = "the file is damaged; copy it again") -> None:
        super().__init__(message, hint)


class UnsupportedError(CkptkitError):
    """A model or a format that ckptkit does not read. The checkpoint may be sound."""

    code = "unsupported"


class UnknownModelError(UnsupportedError):
    """A `model_type` that no family here has."""


class FinalError(CkptkitError):
    """An error after which the same job cannot go on: its source must be mended first, and is another one then."""

    resumable = False

    @classmethod
    def of(cls, error: CkptkitError) -> FinalError:
        """The same message, hint, details and code."""
        return cls(error.args[0], error.hint, error.details, code=error.code)


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception says that there is not enough memory, as Python or torch say it."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "CPUAllocator" in str(error)


@contextmanager
def memory_for(what: object) -> Iterator[None]:
    """Raises CkptkitError with the file or the work `what` where that takes more memory than there is."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        hint = "run it where more memory is free (`ulimit -v` and control groups set limits too)"
        raise CkptkitError(f"{what} needs more memory than is available", hint) from error


def code_of(error: OSError) -> ErrorCode:
    """The code of an error that says why a file cannot be read: "missing", or "other" for rights and disks."""
    return "missing" if isinstance(error, FileNotFoundError) else "other"


def words_of(error: BaseException, with_class: bool = False) -> str:
    """What another library's exception says, on one line and without the folders that libraries are installed in.

    The class comes first where that is asked for or the text alone says little: a key, or nothing.
    """
    text, kind = one_line(str(error)), type(error).__name__
    return f"{kind}: {text}" if text and (with_class or isinstance(error, LookupError)) else text or kind
