"""The loop that runs checks, and what they came to."""

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
from ckptkit.verify.core.check import STAGE_LABELS, Check, Tally, registered
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import ACCEPTED, CheckResult, Finding, Status
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject

_LOG = logging.getLogger(__name__)


def checked_stages(results: Sequence[CheckResult]) -> list[str]:
    """What these checks looked at, as the verdict names it: less what every check of it skipped."""
    stages = {one.code: one.stage for one in registered()}
    found = {STAGE_LABELS[stages[one.code]] for one in results if one.status != "skipped"}
    return [name for name in dict.fromkeys(STAGE_LABELS.values()) if name in found]


Stop = tuple[str, tuple[str, ...]]  # why a check could not look, or not to the end, and the codes that report it


@dataclass
class Outcome:
    """What some checks came to. A check that does not apply is not in `checks`."""

    checks: list[CheckResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)
    # The codes of the checks that could not look, by reason and by what reports it (`CannotCheck`).
    not_checked: dict[Stop, list[str]] = field(default_factory=dict)
    # The codes of those without a subject, by reason.
    not_applicable: dict[str, list[str]] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Each reason for an inconclusive report once, behind the codes of the checks that gave it.

        What another check reports is none.
        """
        left = {why: codes for (why, because), codes in self.not_checked.items() if not because}
        return [f"{', '.join(dict.fromkeys(codes))}: {why}" for why, codes in left.items()]

    @property
    def not_applicable_lines(self) -> list[str]:
        """Each reason why checks do not apply, behind their codes: less those that ran elsewhere."""
        ran = {one.code for one in self.checks}
        left = {reason: sorted({*codes} - ran) for reason, codes in self.not_applicable.items()}
        return [f"{', '.join(codes)}: {reason}" for reason, codes in left.items() if codes]

    def accept(self, accepted: Collection[str]) -> None:
        """Moves what these checks could not look at from the reasons to a fact."""
        for (why, because), codes in list(self.not_checked.items()):
            if taken := [code for code in dict.fromkeys(codes) if code in accepted]:
                self.facts.setdefault(ACCEPTED, []).append(f"{', '.join(taken)}: {why}")
                self.not_checked[why, because] = [code for code in codes if code not in accepted]
        self.not_checked = {stop: codes for stop, codes in self.not_checked.items() if codes}

    def add(self, other: Outcome) -> None:
        """Takes over what other checks, or the same ones elsewhere, came to."""
        self.checks += other.checks
        self.findings += other.findings
        for name, lines in other.facts.items():
            self.facts[name] = list(dict.fromkeys([*self.facts.get(name, []), *lines]))
        for stop, codes in other.not_checked.items():
            self.not_checked.setdefault(stop, []).extend(codes)
        for reason, codes in other.not_applicable.items():
            self.not_applicable.setdefault(reason, []).extend(codes)


def run_checks(subject: Subject, checks: Sequence[Check], broken: str | None = None) -> Outcome:
    """Runs those of the checks that apply, in this order.

    Once a `gate` has failed, those that need sound headers are skipped; `broken` is a gate that has failed already.

    An exception that is none of ours makes the report inconclusive: a fault of this program is not a verdict on the
    checkpoint. What a check found before it raised counts. Raises CkptkitError when the checkpoint cannot be
    opened although none of these checks found anything.
    """
    outcome = Outcome()
    chosen = []
    for one in checks:
        try:
            one.require_subject(subject)
            chosen.append(one)
        except NotApplicable as why:
            if one.stage != "headers":  # these always are for one format or the other
                outcome.not_applicable.setdefault(str(why), []).append(one.code)
    waiting = [one.begin for one in chosen if one.begin is not None]
    for one in chosen:
        if one.needs_sound_headers and broken is None:
            while waiting:
                with suppress(CkptkitError, NotApplicable, CannotCheck):  # the check itself meets it again
                    waiting.pop()(subject)
        with phase(f"{one.code}: {one.title}"):
            ran = _run(one, subject, broken)
        outcome.add(ran)
        if one.gate and broken is None and any(check.status == "failed" for check in ran.checks):
            broken = one.code
    return outcome


def _run(one: Check, subject: Subject, broken: str | None) -> Outcome:
    tally = Tally()
    started = time.monotonic()
    found: list[Finding] = []
    stop: Stop | None = (f"not run because {broken} failed", (broken,)) if broken else None
    try:
        if stop is None or not one.needs_sound_headers:
            stop = _collect(one, subject, tally, found, broken)
    except NotApplicable as why:
        return Outcome(not_applicable={str(why): [one.code]})
    if stop is None and tally.tensors == 0 and not found and broken:
        stop = f"nothing to look at because {broken} failed", (broken,)
    if stop is None and tally.tensors == 0 and not found:
        hint = "a check that looks at nothing proves nothing: please report this"
        found += Issue("something to compare", "nothing was compared", hint).findings(one.code)
    failed = any(finding.severity == "error" for finding in found)
    status: Status = "failed" if failed else "skipped" if stop else "passed"
    seconds = round(time.monotonic() - started, 3)
    result = CheckResult(
        one.code, one.title, status, stop[0] if stop else None, tally.tensors, tally.bytes, seconds, one.failed
    )
    return Outcome([result], found, tally.facts, {stop: [one.code]} if stop else {})


def _collect(one: Check, subject: Subject, tally: Tally, found: list[Finding], broken: str | None) -> Stop | None:
    """Runs a check and adds its findings to `found` as they come.

    Returns what stopped it. Raises NotApplicable where it has no subject.
    """
    try:
        for finding in one.run(subject, tally):
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
    except Exception as error:  # what breaks inside a check must not be read as a fault of the checkpoint
        if library := missing_of_convert(error):
            return f"{library} is not installed here: {INSTALL_CONVERT}", ()
        if lacks_memory(error):
            raise
        _LOG.debug("%s", one.code, exc_info=True)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{words_of(error, with_class=True)} ({Path(frame.filename).name}:{frame.lineno})"
        return f"an error inside this check, which says nothing of the checkpoint: {fault}; please report it", ()
    return None
