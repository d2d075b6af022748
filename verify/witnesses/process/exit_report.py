"""The reason why a witness gave no report, and whether it is a verdict of the code under test on the checkpoint.

A witness records its current phase. An exception is a verdict only if the code under test raised it while it built the
model from the config or loaded the weights. Exceptions of ckptkit, of an import, of the machine (memory, CUDA, a
missing library) or of the environment's set-up are no verdict on the checkpoint.
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import one_line
from ckptkit.verify.witnesses.process.codec import load_record, save

OVER_MEMORY = 256  # replaces the exit code of a process that was ended because of its memory
_OURS = frozenset({"__main__", "ckptkit"})
# Functions of ckptkit that torch calls around other code, so that inner frames belong to that code.
_AROUND_CALLS = frozenset({"__torch_dispatch__", "__torch_function__"})
# By name, since this module is for processes without torch too.
_OF_THE_MACHINE = frozenset(
    {"ImportError", "KeyboardInterrupt", "MemoryError", "NameError", "NotImplementedError", "OSError", "SystemExit"}
    | {"AcceleratorError", "DistBackendError", "DistError", "DistNetworkError", "OutOfMemoryError"}
)
_MACHINE_MESSAGE = re.compile(
    r"can't allocate memory|out of memory|CUDA error|no kernel image|shared object file|_OpNamespace"
    r"|current (?:platform|GPU)|only for NPU",
    re.IGNORECASE,
)
# Words of a refusal that may be due to the device instead of the config.
_NAMES_DEVICE = re.compile(r"\b(?:GPU|CUDA|SM ?\d+|device|platform|capability|kernel|backend)s?\b", re.IGNORECASE)
# Exceptions that Python raises by itself for unexpected values.
_BY_ACCIDENT = (AttributeError, LookupError, NameError, TypeError)
_CONFIGS = frozenset({"PretrainedConfig", "PreTrainedConfig"})  # of transformers, up to 4 and from 5 on
# Modules that start compilers, query devices or create process groups.
_INFRASTRUCTURE = (
    *("ctypes", "subprocess", "triton", "tvm_ffi", "torch.cuda", "torch.utils.cpp_extension"),
    *("torch.distributed.distributed_c10d", "torch.distributed.rendezvous"),
)


@dataclass(frozen=True)
class Phase:
    """A step of a witness, and the modules, by name, with exceptions about the checkpoint."""

    name: str
    code_under_test: tuple[str, ...] = ()  # exceptions of these are verdicts
    config_validators: tuple[str, ...] = ()  # these refuse a config by their own messages, even as ImportError
    infrastructure: tuple[str, ...] = ()  # exceptions of these are about our set-up or the machine


@dataclass
class ExitReport:
    """The phase that a witness is or ended in, in a file next to its report; its exception, if any.

    The witness writes it as a phase begins and, as a context manager, on an exception.
    """

    report: Path  # of the witness
    phase: Phase = Phase("starting")
    step: str = ""  # of the phase
    message: str = ""  # of the exception, with the step
    verdict: bool = False  # the exception is the code under test's verdict on the checkpoint

    def __str__(self) -> str:
        return f"while {self.phase.name}: {self.message}"

    @property
    def path(self) -> Path:
        return self.report.with_suffix(".ending")

    def save(self) -> None:
        save(self, self.path)

    def enter(self, phase: Phase) -> None:
        self.phase, self.step = phase, ""
        self.save()

    def __enter__(self) -> ExitReport:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.message = "; ".join(filter(None, [describe_error(error), self.step]))
            self.verdict = is_verdict(error, self.phase)
            self.save()


def exit_report_of(report: Path) -> ExitReport:
    """The exit report of the witness of `report`. Without a file it ended during its imports."""
    missing = ExitReport(report, Phase("importing its packages"))
    return load_record(ExitReport, missing.path) if missing.path.exists() else missing


def run_job(kind: type[Any], run: Callable[[Any, ExitReport], Any]) -> None:
    """The main function of a witness: runs the job of the command line, and saves the report if `run` returns one."""
    job = load_record(kind, Path(sys.argv[1]))
    with ExitReport(Path(job.report)) as phases:
        if (report := run(job, phases)) is not None:
            save(report, Path(job.report))


def describe_exit_code(code: int) -> str | None:
    """Describes an exit code, or returns None for 0. The kernel kills with SIGKILL when memory runs out."""
    if code == 0:
        return None
    if code == OVER_MEMORY:
        return "ckptkit ended it, because it used nearly all memory that was free at its start"
    if code > 0:
        return f"exit code {code}"
    cause = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{cause}"


def describe_error(error: BaseException) -> str:
    """Describes an exception on one line, with the place that raised it; one of ckptkit only by its message."""
    if isinstance(error, CkptkitError):
        return ": ".join(filter(None, [error.message, error.hint]))
    at = traceback.extract_tb(error.__traceback__)[-1:]
    places = [f" (at {one_line(frame.filename)}, line {frame.lineno}, in {frame.name})" for frame in at]
    return "".join([words_of(error, with_class=True), *places])


def is_verdict(error: BaseException, phase: Phase) -> bool:
    """Whether the code under test raised this because of the checkpoint."""
    if _is_decision(error, phase):
        return True
    frames = _foreign_frames(error)
    if any(map(_is_of_the_machine, _chain(error))) or _is_importing(frames):
        return False
    names = [_module_of(frame) for frame in frames]
    if any(_is_within(name, (*_INFRASTRUCTURE, *phase.infrastructure)) for name in names):
        return False
    return any(_is_within(name, phase.code_under_test) for name in names)


def _is_decision(error: BaseException, phase: Phase) -> bool:
    """Whether a config validator refused the config itself, not the device, or read a key that config.json lacks."""
    if isinstance(error, AttributeError) and {kind.__name__ for kind in type(error.obj).__mro__} & _CONFIGS:
        return bool(phase.config_validators)
    frames = _foreign_frames(error)
    if not frames or _is_importing(frames) or not _is_within(_module_of(frames[-1]), phase.config_validators):
        return False
    is_accident = isinstance(error, _BY_ACCIDENT) or (isinstance(error, ImportError) and error.name is not None)
    message = str(error)
    is_about_device = _MACHINE_MESSAGE.search(message) or _NAMES_DEVICE.search(message)
    return not is_accident and message.strip() != "" and not is_about_device


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception with its causes, including those of the ranks in torch's CheckpointException."""
    while error is not None:
        yield error
        for inner, _ in dict(getattr(error, "failures", {})).values():
            yield from _chain(inner)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_of_the_machine(error: BaseException) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    is_of_machine = bool(kinds & _OF_THE_MACHINE) or _MACHINE_MESSAGE.search(str(error)) is not None
    return is_of_machine and not isinstance(error, FileNotFoundError)


def _foreign_frames(error: BaseException) -> Sequence[FrameType]:
    """The frames below the last one of ckptkit, outermost first; empty if ckptkit raised the exception."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    relevant = [
        frame
        for at, frame in enumerate(frames)
        if not (_is_ours(frame) and frame.f_code.co_name in _AROUND_CALLS and at + 1 < len(frames))
    ]
    last = max((at for at, frame in enumerate(relevant) if _is_ours(frame)), default=-1)
    return relevant[last + 1 :]


def _is_ours(frame: FrameType) -> bool:
    return _module_of(frame).partition(".")[0] in _OURS


def _is_importing(frames: Sequence[FrameType]) -> bool:
    return any(frame.f_code.co_name == "<module>" for frame in frames)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
