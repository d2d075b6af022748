"""CkptkitError and its subclasses, and messages for the exceptions of other libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from ckptkit.core.printable import one_line, printable

ErrorCode = Literal[
    "usage",  # invalid or contradicting options or arguments
    "unsupported",  # a model or format that ckptkit does not read; the checkpoint may be sound
    "missing",  # a file, a part of a checkpoint, or the checkpoint itself is missing
    "damaged",  # a file is truncated, has the wrong format, or contradicts another file of its checkpoint
    "storage",  # a remote store did not answer, or refused access
    "missing-dependency",  # a library must be installed first
    "changed",  # files were written while they were read
    "mismatch",  # compared weights differ
    "other",  # any other error
]


class CkptkitError(Exception):
    """A fault (naming file and tensor) and a `hint` with the next step, each on one line. The exit code is 2.

    `details`: single faults, which are also part of `message`, and printed on separate lines. `code`: the kind of
    error, for programs; codes are stable, messages are not. `resumable`: the same job may succeed later, so its
    finished files are kept.
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
        # All parts may contain names from a checkpoint, and notebooks print control characters like terminals.
        lines = [f"{self.args[0]}:", *self.details] if self.details else [self.message]
        return "\n  ".join(map(printable, [*lines, f"next: {self.hint}"] if self.hint else lines))


class UsageError(CkptkitError):
    """Options or arguments are invalid, or contradict each other."""

    code = "usage"


class MissingDependencyError(CkptkitError):
    """A library must be installed first."""

    code = "missing-dependency"


class MissingError(CkptkitError):
    """A file, a part of a checkpoint, or the checkpoint itself is missing."""

    code = "missing"


class DamagedError(CkptkitError):
    """A file is truncated, has the wrong format, or contradicts another file of its checkpoint."""

    code = "damaged"

    def __init__(self, message: str, hint: str | None = "copy this file again: it is damaged") -> None:
        super().__init__(message, hint)


class UnsupportedError(CkptkitError):
    """A model or a format that ckptkit does not read. The checkpoint may be sound."""

    code = "unsupported"


class UnknownModelError(UnsupportedError):
    """A `model_type` without a family."""


class FinalError(CkptkitError):
    """An error that makes the job impossible to resume: repairing the source makes it a different source."""

    resumable = False

    @classmethod
    def of(cls, error: CkptkitError) -> FinalError:
        """The same message, hint, details and code."""
        return cls(error.args[0], error.hint, error.details, code=error.code)


def lacks_memory(error: BaseException) -> bool:
    """Whether this is Python's or torch's exception for insufficient memory."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "CPUAllocator" in str(error)


@contextmanager
def memory_for(what: object) -> Iterator[None]:
    """Raises CkptkitError, naming the file or work `what`, if the block runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        hint = "run it on a machine with more free memory (`ulimit -v` and control groups also set limits)"
        raise CkptkitError(f"{what} needs more memory than is available", hint) from error


def code_of(error: OSError) -> ErrorCode:
    """The code for an error of reading a file: "missing", or "other" for permissions and disks."""
    return "missing" if isinstance(error, FileNotFoundError) else "other"


def words_of(error: BaseException, with_class: bool = False) -> str:
    """One line for another library's exception; includes the class if `with_class` or the text is a key or empty."""
    text, kind = one_line(str(error)), type(error).__name__
    return f"{kind}: {text}" if text and (with_class or isinstance(error, LookupError)) else text or kind
