"""What a check is, and how it is registered.

A check is a generator of issues. It counts in its `Tally` what it compared; one that compared nothing fails, because a
check that looked at nothing has proved nothing. Every function in `verify/checks/` under `@check` is one; no list names
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from pkgutil import walk_packages
from typing import TypedDict, Unpack

from ckptkit.verify import checks as general
from ckptkit.verify.core.catalogue import Wording, wording_of
from ckptkit.verify.core.issue import Issue, collect
from ckptkit.verify.core.report import BEHAVIOUR, Finding
from ckptkit.verify.core.skip import NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch import checks as of_launches
from ckptkit.verify.witnesses import registry

NOTES, NOT_APPLICABLE = "notes", "not applicable"

WITNESS_OPTIONS = {one.name: one.option for one in registry.WITNESSES}  # and the option that asks for each
# What a check looks at, its stage, and how the verdict names that. `configuration` is JSON files and training
# arguments; only preflight knows a `launch`. Of published deltas no other stage but `deltas` looks at anything.
STAGE_LABELS: dict[str, str] = {
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
NEEDS = frozenset({"sound headers", "source", *WITNESS_OPTIONS})
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

    def add_to_verdict(self, text: str) -> None:
        """Adds what the verdict says of a check of the stage `behaviour`: what was compared with what."""
        self.facts.setdefault(BEHAVIOUR, []).append(text)

    def note(self, text: str) -> None:
        """Adds a remark to `facts["notes"]`: something that readers should know and that is not wrong."""
        self.facts.setdefault(NOTES, []).append(text)


Run = Callable[[Subject, Tally], Iterator[Finding]]

# Raises NotApplicable where a check has no subject (a Megatron directory has no index).
AppliesTo = Callable[[Subject], object]


def only_if(find: Callable[[Subject], object], reason: str) -> AppliesTo:
    """For a check of something that `find` returns; `reason` says that there is none."""

    def applies(subject: Subject) -> None:
        if not find(subject):
            raise NotApplicable(reason)

    return applies


@dataclass(frozen=True)
class Check:
    """One registered check: its stable code, what it is about, why it matters, what to do about a finding.

    `needs` is what must be there for it to run; all but a gate of the stages that read every byte need sound headers
    too. `gate`: where it fails, headers are not sound. `preflight`: preflight
    runs it too, as it does all of the stages `headers` and `launch`. `explained_by`: the codes of checks whose findings
    are the cause of its own about the same tensors. `begin` starts what it asks another process, which answers while
    the checks that read every byte run. `failed`: what is wrong where it has findings.
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
    failed: str = ""

    @property
    def needs_sound_headers(self) -> bool:
        """Whether it is not worth running while headers are wrong."""
        return "sound headers" in self.needs or (self.stage in _READS_EVERY_BYTE and not self.gate)

    @property
    def asks_witness(self) -> bool:
        """Whether it runs only where the user asked for a witness."""
        return not WITNESS_OPTIONS.keys().isdisjoint(self.needs)

    def require_subject(self, subject: Subject) -> None:
        """Raises NotApplicable where it does not apply to this subject, or what it needs was not given."""
        for witness, option in WITNESS_OPTIONS.items():
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
        own = stage or _STAGES.get(folder := issues.__module__.split(".")[3], folder)

        @wraps(issues)
        def run(subject: Subject, tally: Tally) -> Iterator[Finding]:
            return collect(issues(subject, tally), code, text.fix, None if own in _NAMES_ITS_FILES else subject.path)

        if code in _CHECKS:
            raise ValueError(f"{code} is registered twice")
        one = _CHECKS[code] = Check(code, text.title, text.why, text.fix, run, own, failed=text.failed, **when)
        if own not in STAGE_LABELS or not NEEDS.issuperset(one.needs):
            raise ValueError(f"{code} is of the stage {own} and needs {one.needs}: one of these is unknown")
        return run

    return register


def registered() -> Collection[Check]:
    """The checks of all modules that were imported."""
    return _CHECKS.values()


def all_checks(*, witnesses: bool = True) -> Sequence[Check]:
    """Every check, by code: those of all modules in `verify/checks/` and `verify/launch/checks/`.

    `witnesses`: False need not import those of `verify/checks/witnesses/`, a tenth of the time of a preflight.
    """
    for package in (general, of_launches):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if witnesses or not module.name.startswith(_WITNESSES):
                import_module(module.name)
    return [_CHECKS[code] for code in sorted(_CHECKS)]
