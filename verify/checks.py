"""What a check is, how it is registered, and the loop that runs them all.

A check is a generator of findings. It counts in its `Tally` what it compared; one that compared nothing fails,
because a check that looked at nothing has proved nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptkit.errors import CkptkitError
from verify.report import CheckResult, Finding, Status
from verify.subject import Subject


class Skip(Exception):  # noqa: N818
    """Raised by a check that cannot run here; the message is the reason that the report gives."""


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


def run_checks(subject: Subject, checks: Sequence[Check]) -> tuple[list[CheckResult], list[Finding], dict[str, list[str]]]:
    """Runs checks in order of cost. Once names, shapes or files are found wrong, those that read every byte, or cannot be opened, are skipped.

    Raises CkptkitError when one cannot be opened although none of these checks found anything.
    """
    results: list[CheckResult] = []
    findings: list[Finding] = []
    facts: dict[str, list[str]] = {}
    broken: str | None = None
    for one in checks:
        result, found, more = _run(one, subject, broken)
        results.append(result)
        findings += found
        facts |= more
        if result.status == "failed" and one.code in _SOUND_HEADERS and broken is None:
            broken = one.code
    return results, findings, facts


def _run(one: Check, subject: Subject, broken: str | None) -> tuple[CheckResult, list[Finding], dict[str, list[str]]]:
    tally = Tally()
    started = time.monotonic()
    found: list[Finding] = []
    reason = f"not run because {broken} failed" if broken and one.code.startswith(_NEEDS_SOUND_HEADERS) else None
    try:
        found = list(one.run(subject, tally)) if reason is None else []
    except Skip as skip:
        reason = str(skip)
    except CkptkitError as error:
        if broken is None:
            raise
        reason = f"not run because {broken} failed: {error.message}"
    if reason is None and tally.tensors == 0 and not found:
        found = [Finding(one.code, "something to compare", "nothing was compared", "a check that looks at nothing proves nothing: please report this")]
    failed = any(finding.severity == "error" for finding in found)
    status: Status = "skipped" if reason is not None else "failed" if failed else "passed"
    seconds = round(time.monotonic() - started, 3)
    return CheckResult(one.code, one.title, status, reason, tally.tensors, tally.bytes, seconds), found, tally.facts
