"""Why a witness gave no report, and whether that is a verdict of the code under test on the checkpoint.

A witness notes which phase it is in. An exception is a verdict only where the code under test raised it while it built
the model from the config or loaded the weights. One from ckptkit, from an import, from the machine (memory, CUDA, a
missing library) or from setting up the environment says nothing about the checkpoint.
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import one_line
from ckptkit.verify.witnesses.process.codec import load_record, save

OVER_MEMORY = 256  # in place of an exit code: it was ended because of its memory
_OURS = frozenset({"__main__", "ckptkit"})
# Functions of ckptkit that torch calls around other code: what is raised further in comes from that code.
_AROUND_CALLS = frozenset({"__torch_dispatch__", "__torch_function__"})
# By name, since this module is for processes without torch too.
_OF_THE_MACHINE = frozenset(
    {"ImportError", "KeyboardInterrupt", "MemoryError", "NameError", "NotImplementedError", "OSError", "SystemExit"}
    | {"AcceleratorError", "DistBackendError", "DistError", "DistNetworkError", "OutOfMemoryError"}
)
_MACHINE_SAYS = re.compile(
    r"can't allocate memory|out of memory|CUDA error|no kernel image|shared object file|_OpNamespace"
    r"|current (?:platform|GPU)|only for NPU",
    re.IGNORECASE,
)
# What a refusal names that may be due to the device, and not to the config.
_NAMES_DEVICE = re.compile(r"\b(?:GPU|CUDA|SM ?\d+|device|platform|capability|kernel|backend)s?\b", re.IGNORECASE)
# What Python raises by itself where code meets what it was not written for.
_BY_ACCIDENT = (AttributeError, LookupError, NameError, TypeError)
_CONFIGS = frozenset({"PretrainedConfig", "PreTrainedConfig"})  # of transformers, up to 4 and from 5 on
# Modules that start compilers, ask devices or make process groups.
_MACHINERY = (
    *("ctypes", "subprocess", "triton", "tvm_ffi", "torch.cuda", "torch.utils.cpp_extension"),
    *("torch.distributed.distributed_c10d", "torch.distributed.rendezvous"),
)


@dataclass(frozen=True)
class Phase:
    """What a witness is doing, and whose exceptions are then about the checkpoint. Modules are given by name."""

    name: str
    code_under_test: tuple[str, ...] = ()  # modules under test whose exceptions are verdicts in this phase
    config_validators: tuple[
        str, ...
    ] = ()  # modules that refuse a config in words of their own, by an ImportError for one
    infrastructure: tuple[str, ...] = ()  # modules of the engine whose exceptions are about our set-up, or the machine


@dataclass(frozen=True)
class ExitReport:
    """The phase that a witness ended in, what it raised, if anything, and whether that is a verdict."""

    phase: str
    message: str = ""
    verdict: bool = False

    def __str__(self) -> str:
        return f"while {self.phase}: {self.message}"


def exit_report_path(report: Path) -> Path:
    """The file beside `report` in which its witness notes how it ended."""
    return report.with_suffix(".ending")


def exit_report_of(report: Path) -> ExitReport:
    """How the witness of `report` ended. One that wrote nothing ended during its imports."""
    path = exit_report_path(report)
    return load_record(ExitReport, path) if path.exists() else ExitReport("importing its packages")


class PhaseLog:
    """Writes an `ExitReport` beside `report` as a phase begins and, as a context manager, as an exception leaves."""

    def __init__(self, report: Path) -> None:
        self._path = exit_report_path(report)
        self._phase = Phase("starting")
        self._step = ""

    def enter(self, phase: Phase) -> None:
        """Notes that a phase begins."""
        self._phase, self._step = phase, ""
        save(ExitReport(phase.name), self._path)

    def step(self, what: str) -> None:
        """Notes what happens now in this phase. An exception that follows is told with it."""
        self._step = what

    def __enter__(self) -> PhaseLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            message = "; ".join(filter(None, [describe_error(error), self._step]))
            save(ExitReport(self._phase.name, message, is_verdict(error, self._phase)), self._path)


def run_job(kind: type[Any], run: Callable[[Any, PhaseLog], Any]) -> None:
    """What a witness does as a program: runs the job in the file that the command line names, of type `kind`.

    Saves what `run` returns in the job's file `report`; None: it saved its report itself.
    """
    job = load_record(kind, Path(sys.argv[1]))
    with PhaseLog(Path(job.report)) as phases:
        if (found := run(job, phases)) is not None:
            save(found, Path(job.report))


def describe_exit_code(code: int) -> str | None:
    """Describes an exit code; None for 0. A kernel short of memory kills with SIGKILL."""
    if code == 0:
        return None
    if code == OVER_MEMORY:
        return "ended by ckptkit: it took nearly all memory that was free when it began"
    if code > 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}" + (
        ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    )


def describe_error(error: BaseException) -> str:
    """Describes an exception on one line, with the place that raised it; one of ckptkit's own by what it says."""
    if isinstance(error, CkptkitError):
        return ": ".join(filter(None, [error.message, error.hint]))
    at = traceback.extract_tb(error.__traceback__)[-1:]
    places = [f" (at {one_line(frame.filename)}, line {frame.lineno}, in {frame.name})" for frame in at]
    return "".join([words_of(error, with_class=True), *places])


def is_verdict(error: BaseException, phase: Phase) -> bool:
    """Whether the code under test raised this because of the checkpoint."""
    if _is_decision(error, phase):
        return True
    if any(_is_of_the_machine(one) for one in _chain(error)):
        return False
    theirs = _beyond_ours(error)
    names = [str(frame.f_globals.get("__name__", "")) for frame in theirs]
    importing = any(frame.f_code.co_name == "<module>" for frame in theirs)
    in_machinery = any(_is_within(name, (*_MACHINERY, *phase.infrastructure)) for name in names)
    return not importing and not in_machinery and any(_is_within(name, phase.code_under_test) for name in names)


def _is_decision(error: BaseException, phase: Phase) -> bool:
    """Whether a decider itself refused the config, or looked for a key that config.json does not have.

    Neither what fails within it, an import for one, nor what it says of the device that is here.
    """
    if isinstance(error, AttributeError) and {kind.__name__ for kind in type(error.obj).__mro__} & _CONFIGS:
        return bool(phase.config_validators)
    theirs = _beyond_ours(error)
    raised_by = str(theirs[-1].f_globals.get("__name__", "")) if theirs else ""
    if any(frame.f_code.co_name == "<module>" for frame in theirs):
        return False
    by_accident = isinstance(error, _BY_ACCIDENT) or (isinstance(error, ImportError) and error.name is not None)
    says = str(error)
    of_device = _MACHINE_SAYS.search(says) or _NAMES_DEVICE.search(says)
    return _is_within(raised_by, phase.config_validators) and not by_accident and says.strip() != "" and not of_device


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception with its causes; of torch's CheckpointException also what the ranks raised."""
    while error is not None:
        yield error
        for inner, _ in dict(getattr(error, "failures", {})).values():
            yield from _chain(inner)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_of_the_machine(error: BaseException) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return not isinstance(error, FileNotFoundError) and (
        bool(kinds & _OF_THE_MACHINE) or _MACHINE_SAYS.search(str(error)) is not None
    )


def _beyond_ours(error: BaseException) -> Sequence[FrameType]:
    """The frames below the last one of ckptkit, outermost first; none where ckptkit raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    relevant = [
        frame
        for at, frame in enumerate(frames)
        if not (_is_ours(frame) and frame.f_code.co_name in _AROUND_CALLS and at + 1 < len(frames))
    ]
    last = max((at for at, frame in enumerate(relevant) if _is_ours(frame)), default=-1)
    return relevant[last + 1 :]


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
