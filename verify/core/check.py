"""Defines and registers checks. All names that a check needs can be imported from here.

A check is a generator of issues. It counts the tensors that it compared in its `CheckResult`; a check that compared
nothing fails, because it proved nothing. Every function in `verify/checks/` with `@check` is one; no list names them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pkgutil import walk_packages
from typing import TypedDict, Unpack

from ckptkit.verify import checks as general
from ckptkit.verify.core.catalogue import wording_of
from ckptkit.verify.core.issue import Issue, collect, warning_if
from ckptkit.verify.core.report import BEHAVIOUR, CheckResult, Finding, Severity
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.launch import checks as of_launches
from ckptkit.verify.witnesses import registry

# From other modules.
__all__ = ["CannotCheck", "CheckResult", "Issue", "NotApplicable", "Severity", "Subject", "once", "warning_if"]
__all__ += ["AppliesTo", "Check", "Run", "check", "only_if"]
NOT_APPLICABLE = "not applicable"

WITNESS_OPTIONS = {one.name: one.option for one in registry.WITNESSES}
# The label of each stage in the verdict. `configuration` is JSON files and training arguments. Only preflight has a
# `launch`. Published deltas have the stage `deltas` and no other.
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
# `sound headers`: the check reads every byte, which is a waste while headers are wrong. Witnesses are optional.
NEEDS = frozenset({"sound headers", "source", *WITNESS_OPTIONS})
# The stages of folders with another name.
_STAGES = {"checks": "launch", "config": "configuration", "adapters": "adapter", "drafts": "draft"}
_READS_EVERY_BYTE = ("values", "adapter", "draft", "deltas")
# For `all_checks`: preflight asks no witness, and `verify` reads no launch.
OF_WITNESSES, OF_LAUNCHES = f"{general.__name__}.witnesses.", f"{of_launches.__name__}."
_NAMES_ITS_FILES = ("launch", "megatron")  # findings of other stages default to the checkpoint's path


Run = Callable[[Subject, CheckResult], Iterator[Finding]]

# Raises NotApplicable if a check does not apply: a Megatron directory has no index.
AppliesTo = Callable[[Subject], object]


def only_if(find: Callable[[Subject], object], reason: str) -> AppliesTo:
    """Makes an `applies_to` that raises NotApplicable with `reason` if `find` returns nothing."""

    def applies(subject: Subject) -> None:
        if not find(subject):
            raise NotApplicable(reason)

    return applies


@dataclass(frozen=True)
class Check:
    """One registered check, with its wording in `catalogue.toml`."""

    code: str
    title: str
    rationale: str
    fix: str
    run: Run
    stage: str
    needs: tuple[str, ...] = ()
    gate: bool = False  # if it fails, headers are not sound
    preflight: bool = False  # preflight runs it too, like the stages `headers` and `launch`
    applies_to: AppliesTo | None = None
    explained_by: tuple[str, ...] = ()  # codes of checks that find the cause of its findings, for the same tensors
    begin: Callable[[Subject], object] | None = None  # starts another process before the bytes are read
    failed: str = ""  # the title of its findings

    @property
    def needs_sound_headers(self) -> bool:
        """Whether the check is a waste of time while headers are wrong."""
        return "sound headers" in self.needs or (self.stage in _READS_EVERY_BYTE and not self.gate)

    @property
    def asks_witness(self) -> bool:
        """Whether the check runs only if the user asked for a witness."""
        return not WITNESS_OPTIONS.keys().isdisjoint(self.needs)

    def require_subject(self, subject: Subject) -> None:
        """Raises NotApplicable if the check does not apply to this subject, or an option that it needs is missing."""
        for witness, option in WITNESS_OPTIONS.items():
            if witness in self.needs and witness not in subject.against:
                raise NotApplicable(f"{option} was not given")
        if self.applies_to is not None:
            self.applies_to(subject)
        if "source" in self.needs and subject.source_path is None:
            raise NotApplicable("--source was not given")


_CHECKS: dict[str, Check] = {}


class _When(TypedDict, total=False):
    """The fields of `Check` that `check` passes on."""

    needs: tuple[str, ...]
    gate: bool
    preflight: bool
    applies_to: AppliesTo | None
    explained_by: tuple[str, ...]
    begin: Callable[[Subject], object]


def check(
    code: str, *, stage: str | None = None, wording: Mapping[str, str] | None = None, **when: Unpack[_When]
) -> Callable[[Callable[[Subject, CheckResult], Iterator[Issue]]], Run]:
    """Registers a generator of issues as a check; by default its stage is the folder, its wording catalogue.toml's."""
    row = wording or wording_of(code)
    title, failed, why, fix = (row[key] for key in ("title", "failed", "why", "fix"))

    def register(issues: Callable[[Subject, CheckResult], Iterator[Issue]]) -> Run:
        name = stage or _STAGES.get(folder := issues.__module__.split(".")[3], folder)

        @wraps(issues)
        def run(subject: Subject, result: CheckResult) -> Iterator[Finding]:
            return collect(issues(subject, result), code, fix, None if name in _NAMES_ITS_FILES else subject.path)

        if code in _CHECKS:
            raise ValueError(f"{code} is registered twice")
        new = _CHECKS[code] = Check(code, title, why, fix, run, name, failed=failed, **when)
        if name not in STAGE_LABELS or not NEEDS.issuperset(new.needs):
            raise ValueError(f"{code} is of the stage {name} and needs {new.needs}: one of these is unknown")
        return run

    return register


def registered() -> Collection[Check]:
    """The checks of all imported modules."""
    return _CHECKS.values()


def all_checks(without: str | None = None) -> Sequence[Check]:
    """All checks, sorted by code. Modules under `without` are not imported, which takes a tenth of a preflight."""
    for package in (general, of_launches):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if without is None or not module.name.startswith(without):
                import_module(module.name)
    return [_CHECKS[code] for code in sorted(_CHECKS)]
