"""Runs checks and collects their results."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.core.errors import CkptkitError, UnsupportedError, lacks_memory, words_of
from ckptkit.core.installation import INSTALL_CONVERT, missing_of_convert, program_version
from ckptkit.core.progress import phase
from ckptkit.verify.core.check import NOT_APPLICABLE, STAGE_LABELS, Check, registered
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import ACCEPTED, CheckResult, Report, now
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.folding import by_key

_LOG = logging.getLogger(__name__)


def checked_stages(results: Sequence[CheckResult]) -> list[str]:
    """The labels of the stages of these checks, without stages that were skipped completely."""
    stages = {one.code: one.stage for one in registered()}
    found = {STAGE_LABELS[stages[one.code]] for one in results if one.status != "skipped"}
    return [name for name in dict.fromkeys(STAGE_LABELS.values()) if name in found]


def run_checks(subject: Subject, checks: Sequence[Check], broken: str | None = None) -> Report:
    """Runs checks as `results_of` does, and returns the report on them. Raises as it does."""
    return report_of(results_of(subject, checks, broken), str(subject.path), subject.options.accept)


def report_of(results: Sequence[CheckResult], checkpoint: str, accepted: Collection[str] = ()) -> Report:
    """The report on results, which may be of several checkpoints. `accepted` are codes of checks that may stop."""
    ran = [one for one in results if one.status != "not applicable"]
    facts: dict[str, list[str]] = {}
    for result in ran:
        for name, lines in result.facts.items():
            facts[name] = list(dict.fromkeys([*facts.get(name, []), *lines]))
    if lines := _lines(one for one in ran if one.code in accepted):
        facts[ACCEPTED] = lines
    if lines := _lines(one for one in results if one.code not in {check.code for check in ran}):
        facts[NOT_APPLICABLE] = lines
    return Report(
        version=program_version(),
        command=(),
        checkpoint=checkpoint,
        source=None,
        checks=ran,
        findings=[finding for one in ran for finding in one.findings],
        facts=facts,
        reasons=_lines(one for one in ran if one.code not in accepted and not one.because),
        date=now(),
    )


def _lines(results: Iterable[CheckResult]) -> list[str]:
    """The reasons of these checks, each after their codes."""
    by_reason = by_key((one.reason, one.code) for one in results if one.reason is not None)
    return [f"{', '.join(sorted({*codes}))}: {reason}" for reason, codes in by_reason.items()]


def results_of(subject: Subject, checks: Sequence[Check], broken: str | None = None) -> list[CheckResult]:
    """Runs the checks that apply, in this order. The results of others are `not applicable`.

    After a failed `gate` (`broken`: one that failed earlier), checks that need sound headers are skipped. An unexpected
    exception makes the report inconclusive, since a bug of this program is not a fault of the checkpoint; findings
    before it count. Raises CkptkitError if a check cannot open the checkpoint and no gate failed.
    """
    chosen, results = list[Check](), list[CheckResult]()
    for one in checks:
        try:
            one.require_subject(subject)
            chosen.append(one)
        except NotApplicable as why:
            if one.stage != "headers":  # these are always for one of the two formats
                results.append(CheckResult(one.code, one.title, "not applicable", str(why)))
    waiting = [one.begin for one in chosen if one.begin is not None]
    for one in chosen:
        if one.needs_sound_headers and broken is None:
            while waiting:
                with suppress(CkptkitError, NotApplicable, CannotCheck):  # the check itself raises it again
                    waiting.pop()(subject)
        with phase(f"{one.code}: {one.title}"):
            results.append(_run(one, subject, broken))
        if one.gate and broken is None and results[-1].status == "failed":
            broken = one.code
    return results


def _run(one: Check, subject: Subject, broken: str | None) -> CheckResult:
    result, started = CheckResult(one.code, one.title, failed=one.failed), time.monotonic()
    try:
        if broken and one.needs_sound_headers:
            result.stop(f"not run because {broken} failed", broken)
        else:
            _fill(one, subject, result, broken)
    except NotApplicable as why:
        return CheckResult(one.code, one.title, "not applicable", str(why))
    if result.reason is None and result.tensors_compared == 0 and not result.findings:
        if broken:
            result.stop(f"nothing to check because {broken} failed", broken)
        else:
            hint = "report this: a check that compared nothing proves nothing"
            result.findings += Issue("something to compare", "nothing was compared", hint).findings(one.code)
    has_error = any(finding.severity == "error" for finding in result.findings)
    result.status = "failed" if has_error else "skipped" if result.reason is not None else "passed"
    result.seconds = round(time.monotonic() - started, 3)
    return result


def _fill(one: Check, subject: Subject, result: CheckResult, broken: str | None) -> None:
    """Runs a check, and adds its findings and why it stopped to its result. Raises NotApplicable as it does."""
    try:
        for finding in one.run(subject, result):
            result.findings.append(finding)
    except NotApplicable as why:
        if not result.findings and not one.asks_witness:
            raise
        result.stop(str(why), *(() if one.asks_witness else (one.code,)))
    except CannotCheck as why:
        result.stop(str(why), *(() if one.asks_witness else why.because))
    except CkptkitError as error:
        if broken is not None:
            result.stop(f"not run because {broken} failed", broken)
        elif isinstance(error, UnsupportedError):
            result.stop(f"{error.message}; {error.hint}")
        elif not result.findings:
            raise
        else:
            result.stop(error.message)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a bug of a check must not be reported as a fault of the checkpoint
        if library := missing_of_convert(error):
            result.stop(f"{library} is not installed: {INSTALL_CONVERT}")
            return
        if lacks_memory(error):
            raise
        _LOG.debug("%s", one.code, exc_info=True)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{words_of(error, with_class=True)} ({Path(frame.filename).name}:{frame.lineno})"
        result.stop(f"an error inside this check (not a fault of the checkpoint): {fault}; please report it")
