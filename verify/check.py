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
from verify import checks as general
from verify.catalogue import Wording, wording_of
from verify.evidence.subject import Subject
from verify.issue import Issue, collect
from verify.launch import checks as of_launches
from verify.report import BEHAVIOUR, CheckResult, Finding, Status
from verify.skip import CannotCheck as CannotCheck
from verify.skip import NotApplicable as NotApplicable
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

    def compared(self, tensors: int = 1, nbytes: int = 0) -> None:
        """Counts tensors (or header entries, or files) as looked at, and the bytes of theirs that were read."""
        self.tensors += tensors
        self.bytes += nbytes

    def tell(self, text: str) -> None:
        """Adds what the verdict says of a check of the stage `behaviour`: what was compared with what."""
        self.facts.setdefault(BEHAVIOUR, []).append(text)

    def note(self, text: str) -> None:
        """Adds a remark to `facts["notes"]`: something that readers should know and that is not wrong."""
        self.facts.setdefault(NOTES, []).append(text)


Run = Callable[[Subject, Tally], Iterator[Finding]]

# Raises NotApplicable where a check has no subject (a Megatron directory has no index).
AppliesTo = Callable[[Subject], object]


def where(find: Callable[[Subject], object], otherwise: str) -> AppliesTo:
    """For a check of something that `find` returns; `otherwise` says that there is none."""

    def applies(subject: Subject) -> None:
        if not find(subject):
            raise NotApplicable(otherwise)

    return applies


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
    applies_to: AppliesTo | None = None
    explained_by: tuple[str, ...] = ()
    begin: Callable[[Subject], object] | None = None

    @property
    def needs_sound_headers(self) -> bool:
        """Whether it is not worth running while headers are wrong."""
        return "sound headers" in self.needs or (self.stage in _READS_EVERY_BYTE and not self.gate)

    @property
    def asks_witness(self) -> bool:
        """Whether it runs only where the user asked for a witness."""
        return not WITNESSES.keys().isdisjoint(self.needs)

    def require_subject(self, subject: Subject) -> None:
        """Raises NotApplicable where it does not apply to this subject, or what it needs was not given."""
        for witness, option in WITNESSES.items():
            if witness in self.needs and witness not in subject.against:
                raise NotApplicable(f"{option} was not given")
        if self.applies_to is not None:
            self.applies_to(subject)
        if "source" in self.needs and subject.source_path is None:
            raise NotApplicable("no --source was given")


_CHECKS: dict[str, Check] = {}
_WITNESSES = f"{general.__name__}.witnesses."


class _When(TypedDict, total=False):
    """When a check runs, and what follows from it; fields as in `Check`."""

    needs: tuple[str, ...]
    gate: bool
    preflight: bool
    applies_to: AppliesTo | None
    explained_by: tuple[str, ...]
    begin: Callable[[Subject], object]


def check(
    code: str, *, stage: str | None = None, wording: Wording | None = None, **when: Unpack[_When]
) -> Callable[[Callable[[Subject, Tally], Iterator[Issue]]], Run]:
    """Registers a generator function as the check `code` (fields as in `Check`); called, it then gives findings.

    The folder of its module is its stage, unless it has another; its wording is that of `catalogue.toml`, unless given.
    """
    text = wording or wording_of(code)

    def register(issues: Callable[[Subject, Tally], Iterator[Issue]]) -> Run:
        own = stage or _STAGES.get(folder := issues.__module__.split(".")[2], folder)

        @wraps(issues)
        def run(subject: Subject, tally: Tally) -> Iterator[Finding]:
            return collect(issues(subject, tally), code, text.fix, None if own in _NAMES_ITS_FILES else subject.path)

        if code in _CHECKS:
            raise ValueError(f"{code} is registered twice")
        one = _CHECKS[code] = Check(code, text.title, text.why, text.fix, run, own, **when)
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


def looked_at(results: Sequence[CheckResult]) -> list[str]:
    """What these checks looked at, as the verdict names it: less what every check of it skipped."""
    stages = {one.code: one.stage for one in _CHECKS.values()}
    found = {LOOKS_AT[stages[one.code]] for one in results if one.status != "skipped"}
    return [name for name in dict.fromkeys(LOOKS_AT.values()) if name in found]


Stop = tuple[str, tuple[str, ...]]  # why a check could not look, or not to the end, and the codes that report it


@dataclass
class Outcome:
    """What some checks came to. A check that does not apply is not in `checks`."""

    checks: list[CheckResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)
    # The codes of the checks that could not look, by reason and by what reports it (`CannotCheck`).
    not_checked: dict[Stop, list[str]] = field(default_factory=dict)
    not_applicable: dict[str, list[str]] = field(
        default_factory=dict
    )  # the codes of those without a subject, by reason

    @property
    def reasons(self) -> list[str]:
        """Each reason for an inconclusive report once, behind the codes of the checks that gave it.

        What a finding reports is none.
        """
        found = {one.code for one in self.findings}
        left = {why: codes for (why, because), codes in self.not_checked.items() if found.isdisjoint(because)}
        return [f"{', '.join(dict.fromkeys(codes))}: {why}" for why, codes in left.items()]

    @property
    def not_applicable_lines(self) -> list[str]:
        """Each reason why checks do not apply, behind their codes: less those that ran elsewhere."""
        ran = {one.code for one in self.checks}
        left = {reason: sorted({*codes} - ran) for reason, codes in self.not_applicable.items()}
        return [f"{', '.join(codes)}: {reason}" for reason, codes in left.items() if codes]

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
    result = CheckResult(one.code, one.title, status, stop[0] if stop else None, tally.tensors, tally.bytes, seconds)
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
