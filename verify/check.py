"""What a check is, how it is registered, and the loop that runs them all.

A check is a generator of findings. It counts in its `Tally` what it compared; one that compared nothing fails,
because a check that looked at nothing has proved nothing.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ckptkit.core.errors import CkptkitError, UnsupportedError
from verify.evidence.subject import Subject
from verify.report import CheckResult, Finding, Status

NOTES = "notes"
# Checks that run only when their witness is asked for, by the beginning of their code.
WITNESSES: Mapping[str, str] = MappingProxyType({"CK4": "megatron", "CK5": "sglang"})
_LOG = logging.getLogger(__name__)


class Skip(Exception):  # noqa: N818
    """Raised by a check that has nothing to look at here; the message is the reason that the report gives."""


class Unable(Skip):
    """Raised by a check that cannot look at what it was asked to: a package is missing, a tool of ours broke.

    Unless something else is found wrong, the report is then inconclusive, with this message as its reason.
    """


@dataclass
class Tally:
    """What a check has looked at so far, and facts worth printing (`facts["pipeline stages"] = [...]`)."""

    tensors: int = 0
    bytes: int = 0
    facts: dict[str, list[str]] = field(default_factory=dict)

    def compared(self, nbytes: int, tensors: int = 1) -> None:
        """Counts `tensors` tensors (or header entries) of together `nbytes` bytes as looked at."""
        self.tensors += tensors
        self.bytes += nbytes

    def note(self, text: str) -> None:
        """Adds a remark to `facts["notes"]`: something that readers should know and that is not wrong."""
        self.facts.setdefault(NOTES, []).append(text)


Run = Callable[[Subject, Tally], Iterator[Finding]]

# Why a check does not apply to this subject (a Megatron directory has no index); None when it does.
Unless = Callable[[Subject], str | None]


def _always(subject: Subject) -> str | None:
    return None


@dataclass(frozen=True)
class Check:
    """One registered check: its stable code, what it is about, why it matters, what to do about a finding."""

    code: str
    title: str
    rationale: str
    fix: str
    run: Run
    unless: Unless = _always


# Checks that read every byte: not worth it while headers are wrong. Witnesses were asked for, so they run whenever they can.
_NEEDS_SOUND_HEADERS = "CK2"
# Where these fail there is no whole checkpoint to read. A wrong total_size (CK106) or dtype (CK107) leaves all bytes readable.
_SOUND_HEADERS = frozenset({"CK101", "CK102", "CK103", "CK104", "CK105", "CK111", "CK112", "CK113"})

_CHECKS: dict[str, Check] = {}


def check(code: str, title: str, *, rationale: str, fix: str, unless: Unless = _always) -> Callable[[Run], Run]:
    """Registers a generator function as the check `code`. `unless` names the reason where it does not apply."""

    def register(run: Run) -> Run:
        if code in _CHECKS:
            raise ValueError(f"{code} is registered twice")
        _CHECKS[code] = Check(code, title, rationale, fix, run, unless)
        return run

    return register


def all_checks() -> Sequence[Check]:
    """Every check, by code."""
    from verify import load_checks

    load_checks()
    return [_CHECKS[code] for code in sorted(_CHECKS)]


@dataclass
class Outcome:
    """What some checks came to. `unlooked` says why, and which, could not look at what they were asked to look at."""

    checks: list[CheckResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)
    unlooked: dict[str, list[str]] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Each reason for an inconclusive report once, behind the codes of the checks that gave it."""
        return [f"{', '.join(dict.fromkeys(codes))}: {reason}" for reason, codes in self.unlooked.items()]

    def add(self, other: Outcome) -> None:
        """Takes over what other checks, or the same ones elsewhere, came to."""
        self.checks += other.checks
        self.findings += other.findings
        for name, lines in other.facts.items():
            self.facts[name] = list(dict.fromkeys([*self.facts.get(name, []), *lines]))
        for reason, codes in other.unlooked.items():
            self.unlooked.setdefault(reason, []).extend(codes)


def run_checks(subject: Subject, checks: Sequence[Check]) -> Outcome:
    """Runs checks in order of cost. Once names, shapes or files are found wrong, those that read every byte, or cannot be opened, are skipped.

    An exception that is none of ours makes the report inconclusive: a fault of this program is no verdict on the checkpoint. Raises
    CkptkitError when the checkpoint cannot be opened although none of these checks found anything.
    """
    outcome = Outcome()
    broken: str | None = None
    for one in checks:
        ran = _run(one, subject, broken)
        outcome.add(ran)
        if ran.checks[0].status == "failed" and one.code in _SOUND_HEADERS and broken is None:
            broken = one.code
    return outcome


def _run(one: Check, subject: Subject, broken: str | None) -> Outcome:
    tally = Tally()
    started = time.monotonic()
    found: list[Finding] = []
    unable = False
    reason = f"not run because {broken} failed" if broken and one.code.startswith(_NEEDS_SOUND_HEADERS) else None
    try:
        found = list(one.run(subject, tally)) if reason is None else []
    except Skip as skip:
        # A witness runs only where it was asked for, so whatever it leaves out was asked for.
        reason, unable = str(skip), isinstance(skip, Unable) or one.code.startswith(tuple(WITNESSES))
    except UnsupportedError as error:
        reason, unable = f"{error.message}: {error.hint}", True
    except CkptkitError as error:
        if broken is None:
            raise
        reason = f"not run because {broken} failed: {error.message}"
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - what breaks inside a check must not be read as a fault of the checkpoint
        _LOG.debug("%s", one.code, exc_info=True)
        reason, unable = _own_fault(error), True
    if reason is None and tally.tensors == 0 and not found:
        found = [
            Finding(
                one.code,
                "something to compare",
                "nothing was compared",
                "a check that looks at nothing proves nothing: please report this",
            )
        ]
    failed = any(finding.severity == "error" for finding in found)
    status: Status = "skipped" if reason is not None else "failed" if failed else "passed"
    seconds = round(time.monotonic() - started, 3)
    result = CheckResult(one.code, one.title, status, reason, tally.tensors, tally.bytes, seconds)
    return Outcome([result], found, tally.facts, {reason: [one.code]} if reason is not None and unable else {})


def _own_fault(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = "".join(traceback.format_exception_only(error)).strip()
    return f"an error inside this check, which says nothing of the checkpoint: {said} ({Path(frame.filename).name}:{frame.lineno}); please report it"
