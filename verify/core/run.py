"""Runs checks and collects their results."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.core.errors import CkptkitError, UnsupportedError, lacks_memory, words_of
from ckptkit.core.installation import INSTALL_CONVERT, missing_of_convert
from ckptkit.core.progress import phase
from ckptkit.verify.core.check import STAGE_LABELS, Check, registered
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import ACCEPTED, CheckResult, Finding
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject

_LOG = logging.getLogger(__name__)


def checked_stages(results: Sequence[CheckResult]) -> list[str]:
    """The labels of the stages of these checks, without stages that were skipped completely."""
    stages = {one.code: one.stage for one in registered()}
    found = {STAGE_LABELS[stages[one.code]] for one in results if one.status != "skipped"}
    return [name for name in dict.fromkeys(STAGE_LABELS.values()) if name in found]


Stop = tuple[str, tuple[str, ...]]  # why a check stopped, and the codes of the checks that report the reason


@dataclass
class Outcome:
    """The results of some checks. A check that does not apply is not in `checks`."""

    checks: list[CheckResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)
    not_checked: dict[Stop, list[str]] = field(default_factory=dict)  # codes of the checks that stopped, by reason
    not_applicable: dict[str, list[str]] = field(default_factory=dict)  # codes of the checks that do not apply

    @property
    def reasons(self) -> list[str]:
        """The reasons for an inconclusive report that no other check reports, each after the codes of its checks."""
        left = {why: codes for (why, because), codes in self.not_checked.items() if not because}
        return [f"{', '.join(dict.fromkeys(codes))}: {why}" for why, codes in left.items()]

    @property
    def not_applicable_lines(self) -> list[str]:
        """Why checks do not apply, each reason after their codes, without checks that ran for another checkpoint."""
        ran = {one.code for one in self.checks}
        left = {reason: sorted({*codes} - ran) for reason, codes in self.not_applicable.items()}
        return [f"{', '.join(codes)}: {reason}" for reason, codes in left.items() if codes]

    def accept(self, accepted: Collection[str]) -> None:
        """Moves the reasons of these checks to a fact."""
        for (why, because), codes in list(self.not_checked.items()):
            if taken := [code for code in dict.fromkeys(codes) if code in accepted]:
                self.facts.setdefault(ACCEPTED, []).append(f"{', '.join(taken)}: {why}")
                self.not_checked[why, because] = [code for code in codes if code not in accepted]
        self.not_checked = {stop: codes for stop, codes in self.not_checked.items() if codes}

    def add(self, other: Outcome) -> None:
        """Adds the results of other checks, or of the same checks for another checkpoint."""
        self.checks += other.checks
        self.findings += other.findings
        for name, lines in other.facts.items():
            self.facts[name] = list(dict.fromkeys([*self.facts.get(name, []), *lines]))
        for stop, codes in other.not_checked.items():
            self.not_checked.setdefault(stop, []).extend(codes)
        for reason, codes in other.not_applicable.items():
            self.not_applicable.setdefault(reason, []).extend(codes)


def run_checks(subject: Subject, checks: Sequence[Check], broken: str | None = None) -> Outcome:
    """Runs the checks that apply, in this order.

    After a failed `gate` (`broken`: one that failed earlier), checks that need sound headers are skipped. An unexpected
    exception makes the report inconclusive, since a bug of this program is not a fault of the checkpoint; findings
    before it count. Raises CkptkitError if a check cannot open the checkpoint and no gate failed.
    """
    outcome = Outcome()
    chosen = []
    for one in checks:
        try:
            one.require_subject(subject)
            chosen.append(one)
        except NotApplicable as why:
            if one.stage != "headers":  # these are always for one of the two formats
                outcome.not_applicable.setdefault(str(why), []).append(one.code)
    waiting = [one.begin for one in chosen if one.begin is not None]
    for one in chosen:
        if one.needs_sound_headers and broken is None:
            while waiting:
                with suppress(CkptkitError, NotApplicable, CannotCheck):  # the check itself raises it again
                    waiting.pop()(subject)
        with phase(f"{one.code}: {one.title}"):
            ran = _run(one, subject, broken)
        outcome.add(ran)
        if one.gate and broken is None and any(check.status == "failed" for check in ran.checks):
            broken = one.code
    return outcome


def _run(one: Check, subject: Subject, broken: str | None) -> Outcome:
    result = CheckResult(one.code, one.title, failed=one.failed)
    started = time.monotonic()
    found: list[Finding] = []
    stop: Stop | None = (f"not run because {broken} failed", (broken,)) if broken else None
    try:
        if stop is None or not one.needs_sound_headers:
            stop = _collect(one, subject, result, found, broken)
    except NotApplicable as why:
        return Outcome(not_applicable={str(why): [one.code]})
    if stop is None and result.tensors_compared == 0 and not found and broken:
        stop = f"nothing to look at because {broken} failed", (broken,)
    if stop is None and result.tensors_compared == 0 and not found:
        hint = "a check that looks at nothing proves nothing: please report this"
        found += Issue("something to compare", "nothing was compared", hint).findings(one.code)
    failed = any(finding.severity == "error" for finding in found)
    result.status, result.reason = "failed" if failed else "skipped" if stop else "passed", stop[0] if stop else None
    result.seconds = round(time.monotonic() - started, 3)
    return Outcome([result], found, result.facts, {stop: [one.code]} if stop else {})


def _collect(
    one: Check, subject: Subject, result: CheckResult, found: list[Finding], broken: str | None
) -> Stop | None:
    """Runs a check, adds its findings to `found` and returns why it stopped. Raises NotApplicable as it does."""
    try:
        for finding in one.run(subject, result):
            found.append(finding)  # noqa: PERF402 - those before an exception count too
    except NotApplicable as why:
        if not found and not one.asks_witness:
            raise
        return str(why), () if one.asks_witness else (one.code,)
    except CannotCheck as why:
        return str(why), () if one.asks_witness else why.because
    except CkptkitError as error:
        if broken is not None:
            return f"not run because {broken} failed", (broken,)
        if isinstance(error, UnsupportedError):
            return f"{error.message}; {error.hint}", ()
        if not found:
            raise
        return error.message, ()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a bug of a check must not be reported as a fault of the checkpoint
        if library := missing_of_convert(error):
            return f"{library} is not installed here: {INSTALL_CONVERT}", ()
        if lacks_memory(error):
            raise
        _LOG.debug("%s", one.code, exc_info=True)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{words_of(error, with_class=True)} ({Path(frame.filename).name}:{frame.lineno})"
        return f"an error inside this check (not a fault of the checkpoint): {fault}; please report it", ()
    return None
