"""What a check is, how it is registered, and the loop that runs them all.

A check is a generator of issues. It counts in its `Tally` what it compared; one that compared nothing fails, because a
check that looked at nothing has proved nothing. Every function in `verify/checks/` under `@check` is one; no list names
them.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import TypedDict, Unpack

from ckptkit.core.errors import CkptkitError, UnsupportedError, lacks_memory, words_of
from ckptkit.core.installation import INSTALL_CONVERT, missing_of_convert
from ckptkit.core.progress import phase
from ckptkit.formats.detect import Kind
from verify import checks as general
from verify.evidence.subject import Subject
from verify.issue import Issue, collect
from verify.launch import checks as of_launches
from verify.report import BEHAVIOUR, CheckResult, Finding, Status
from verify.skip import Inapplicable, OfNoFamily
from verify.skip import Skip as Skip
from verify.skip import Unable as Unable
from verify.witnesses import registry

NOTES, NOT_APPLICABLE = "notes", "not applicable"
_LOG = logging.getLogger(__name__)

WITNESSES = {one.name: one.option for one in registry.WITNESSES}  # and the option that asks for each
# What a check looks at, its stage, and how the verdict names that. `configuration` is JSON files and training
# arguments; only preflight knows a `launch`. Of published deltas no other stage but `deltas` looks at anything.
LOOKS_AT: dict[str, str] = {
    "launch": "launch",
    "deltas": "deltas",
    "headers": "files",
    "configuration": "files",
    "values": "values",
    "adapter": "adapter",
    "draft": "draft model",
    "quantization": "files",
    **{one.name: one.looks_at for one in registry.WITNESSES if one.looks_at},
    BEHAVIOUR: BEHAVIOUR,
}
# What a check may need. `sound headers`: it reads every byte, which is not worth it while headers are wrong. A witness
# must be asked for.
NEEDS = frozenset({"sound headers", "source", *WITNESSES})
# Folders of checks that are called otherwise than their stage.
_STAGES = {"checks": "launch", "config": "configuration", "adapters": "adapter", "drafts": "draft"}
_READS_EVERY_BYTE = ("values", "adapter", "draft", "deltas")
_NAMES_ITS_FILES = ("launch", "megatron")  # a finding of others is about the checkpoint, where it names no file


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

    def tell(self, text: str) -> None:
        """Adds what the verdict says of a check of the stage `behaviour`: what was compared with what."""
        self.facts.setdefault(BEHAVIOUR, []).append(text)

    def note(self, text: str) -> None:
        """Adds a remark to `facts["notes"]`: something that readers should know and that is not wrong."""
        self.facts.setdefault(NOTES, []).append(text)


Run = Callable[[Subject, Tally], Iterator[Finding]]

# Why a check does not apply to this subject (a Megatron directory has no index); None when it does.
Unless = Callable[[Subject], str | None]


def only(kind: Kind, otherwise: str) -> Unless:
    """For a check of one kind of checkpoint; `otherwise` says why it does not apply to the other."""
    return without(lambda subject: subject.kind == kind, otherwise)


def without(find: Callable[[Subject], object], otherwise: str) -> Unless:
    """For a check of something that `find` returns; `otherwise` says that there is none."""
    return lambda subject: None if find(subject) else otherwise


@dataclass(frozen=True)
class Check:
    """One registered check: its stable code, what it is about, why it matters, what to do about a finding.

    `needs` is what must be there for it to run; all but a gate of the stages that read every byte need sound headers
    too. `gate`: where it fails, headers are not sound. `preflight`: preflight
    runs it too, as it does all of the stages `headers` and `launch`. `explained_by`: the codes of checks whose findings
    are the cause of its own about the same tensors. `begin` starts what it asks another process, which answers while
    the checks that read every byte run.
    """

    code: str
    title: str
    rationale: str
    fix: str
    run: Run
    stage: str
    needs: tuple[str, ...] = ()
    gate: bool = False
    preflight: bool = False
    unless: Unless | None = None
    explained_by: tuple[str, ...] = ()
    begin: Callable[[Subject], object] | None = None

    @property
    def needs_sound_headers(self) -> bool:
        """Whether it is not worth running while headers are wrong."""
        return "sound headers" in self.needs or (self.stage in _READS_EVERY_BYTE and not self.gate)

    def left_out(self, subject: Subject) -> str | None:
        """Why it does not apply to this subject; None when it does."""
        for witness, option in WITNESSES.items():
            if witness in self.needs and witness not in subject.against:
                return f"{option} was not given"
        if self.unless is not None and (reason := self.unless(subject)) is not None:
            return reason
        return "no --source was given" if "source" in self.needs and subject.source_path is None else None


_CHECKS: dict[str, Check] = {}
_WITNESSES = f"{general.__name__}.witnesses."


class _When(TypedDict, total=False):
    """When a check runs, and what follows from it; fields as in `Check`."""

    needs: tuple[str, ...]
    gate: bool
    preflight: bool
    unless: Unless | None
    explained_by: tuple[str, ...]
    begin: Callable[[Subject], object]


def check(
    code: str, title: str, *, rationale: str, fix: str, stage: str | None = None, **when: Unpack[_When]
) -> Callable[[Callable[[Subject, Tally], Iterator[Issue]]], Run]:
    """Registers a generator function as the check `code` (fields as in `Check`); called, it then gives findings.

    The folder of its module is its stage, unless it has another.
    """

    def register(issues: Callable[[Subject, Tally], Iterator[Issue]]) -> Run:
        own = stage or _STAGES.get(folder := issues.__module__.split(".")[2], folder)

        @wraps(issues)
        def run(subject: Subject, tally: Tally) -> Iterator[Finding]:
            return collect(issues(subject, tally), code, fix, None if own in _NAMES_ITS_FILES else subject.path)

        if code in _CHECKS:
            raise ValueError(f"{code} is registered twice")
        one = _CHECKS[code] = Check(code, title, rationale, fix, run, own, **when)
        if own not in LOOKS_AT or not NEEDS.issuperset(one.needs):
            raise ValueError(f"{code} is of the stage {own} and needs {one.needs}: one of these is unknown")
        return run

    return register


def all_checks(*, witnesses: bool = True) -> Sequence[Check]:
    """Every check, by code: those of all modules in `verify/checks/` and `verify/launch/checks/`.

    `witnesses`: False need not import those of `verify/checks/witnesses/`, a tenth of the time of a preflight.
    """
    for package in (general, of_launches):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if witnesses or not module.name.startswith(_WITNESSES):
                import_module(module.name)
    return [_CHECKS[code] for code in sorted(_CHECKS)]


def applicable_checks(subject: Subject, checks: Sequence[Check]) -> tuple[list[Check], list[str]]:
    """The checks that apply, and a line for each reason why others do not. A check left out is not a skipped one.

    Of checks of headers, which always are for one format or the other, nothing is said.
    """
    chosen: list[Check] = []
    reasons: dict[str, list[str]] = {}
    for one in checks:
        if (reason := one.left_out(subject)) is None:
            chosen.append(one)
        elif one.stage != "headers":
            reasons.setdefault(reason, []).append(one.code)
    return chosen, [f"{', '.join(codes)}: {reason}" for reason, codes in reasons.items()]


def looked_at(results: Sequence[CheckResult]) -> list[str]:
    """What these checks looked at, as the verdict names it: less what every check of it skipped."""
    stages = {one.code: one.stage for one in _CHECKS.values()}
    found = {LOOKS_AT[stages[one.code]] for one in results if one.status != "skipped"}
    return [name for name in dict.fromkeys(LOOKS_AT.values()) if name in found]


@dataclass
class Outcome:
    """What some checks came to."""

    checks: list[CheckResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)
    # Why what was asked for could not be looked at, and the codes of the checks.
    not_checked: dict[str, list[str]] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """Each reason for an inconclusive report once, behind the codes of the checks that gave it."""
        return [f"{', '.join(dict.fromkeys(codes))}: {reason}" for reason, codes in self.not_checked.items()]

    def add(self, other: Outcome) -> None:
        """Takes over what other checks, or the same ones elsewhere, came to."""
        self.checks += other.checks
        self.findings += other.findings
        for name, lines in other.facts.items():
            self.facts[name] = list(dict.fromkeys([*self.facts.get(name, []), *lines]))
        for reason, codes in other.not_checked.items():
            self.not_checked.setdefault(reason, []).extend(codes)


def run_checks(subject: Subject, checks: Sequence[Check], broken: str | None = None) -> Outcome:
    """Runs checks in this order. Once a `gate` has failed, those that need sound headers are skipped.

    `broken`: a gate that has failed already.

    An exception that is none of ours makes the report inconclusive: a fault of this program is not a verdict on the
    checkpoint. What a check found before it raised counts. Raises CkptkitError when the checkpoint cannot be
    opened although none of these checks found anything.
    """
    outcome = Outcome()
    waiting = [one.begin for one in checks if one.begin is not None]
    for one in checks:
        if one.needs_sound_headers and broken is None:
            while waiting:
                with suppress(CkptkitError, Skip):  # the check itself meets it again
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
    if broken and one.needs_sound_headers:
        reason: str | None = f"not run because {broken} failed"
        unable = False
    else:
        try:
            reason, unable = _collect(one, subject, tally, found, broken)
        except Inapplicable as why:
            return Outcome(facts={NOT_APPLICABLE: [f"{one.code}: {why}"]})
    if reason is None and tally.tensors == 0 and not found and broken:
        reason = f"nothing to look at because {broken} failed"
    if reason is None and tally.tensors == 0 and not found:
        hint = "a check that looks at nothing proves nothing: please report this"
        found += Issue("something to compare", "nothing was compared", hint).findings(one.code)
    failed = any(finding.severity == "error" for finding in found)
    status: Status = "failed" if failed else "skipped" if reason is not None else "passed"
    seconds = round(time.monotonic() - started, 3)
    result = CheckResult(one.code, one.title, status, reason, tally.tensors, tally.bytes, seconds)
    return Outcome([result], found, tally.facts, {reason: [one.code]} if reason is not None and unable else {})


def _collect(
    one: Check, subject: Subject, tally: Tally, found: list[Finding], broken: str | None
) -> tuple[str | None, bool]:
    """Runs a check and adds its findings to `found` as they come.

    Returns why it did not look, or not to the end, and whether it was asked to look.
    """
    try:
        for finding in one.run(subject, tally):
            found.append(finding)  # noqa: PERF402 - those before an exception count too
    except OfNoFamily as why:
        if set(one.needs).isdisjoint(WITNESSES):
            raise
        return str(why), True
    except Inapplicable:
        raise
    except Skip as skip:
        # A witness runs only where it was asked for, so whatever it leaves out was asked for.
        return str(skip), isinstance(skip, Unable) or not set(one.needs).isdisjoint(WITNESSES)
    except CkptkitError as error:
        if broken is not None:
            return f"not run because {broken} failed", False
        if isinstance(error, UnsupportedError):
            return f"{error.message}; {error.hint}", True
        if not found:
            raise
        return error.message, True
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what breaks inside a check must not be read as a fault of the checkpoint
        if library := missing_of_convert(error):
            return f"{library} is not installed here: {INSTALL_CONVERT}", True
        if lacks_memory(error):
            raise
        _LOG.debug("%s", one.code, exc_info=True)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{words_of(error, with_class=True)} ({Path(frame.filename).name}:{frame.lineno})"
        return f"an error inside this check, which says nothing of the checkpoint: {fault}; please report it", True
    return None, False
