"""How a witness ended that gave no report, and whether that is what SGLang or Megatron says of the checkpoint.

A witness writes down which phase it is in. An exception speaks of the checkpoint only where the code under test raised it while
it built the model from the config or loaded the weights. One raised by our own code, during an import, by the machine (memory,
CUDA, a missing library), or while the environment was set up says nothing about the checkpoint.
"""

from __future__ import annotations

import json
import re
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

_OURS = frozenset({"__main__", "ckptkit", "converters", "quant", "verify"})
# Ours, around calls that torch makes for others: what is raised farther in is not ours.
_AROUND_CALLS = frozenset({"__torch_dispatch__", "__torch_function__"})
# By name, since this module is for processes without torch too.
_OF_THE_MACHINE = frozenset(
    {"ImportError", "KeyboardInterrupt", "MemoryError", "NameError", "NotImplementedError", "OSError", "SystemExit"}
    | {"AcceleratorError", "DistBackendError", "DistError", "DistNetworkError", "OutOfMemoryError"}
)
_MACHINE_SAYS = re.compile(
    r"can't allocate memory|out of memory|CUDA error|no kernel image|shared object file|_OpNamespace", re.IGNORECASE
)
# Where compilers are started, devices asked and process groups made, and where SGLang asks for what was to be set up before.
_MACHINERY = (
    *(
        "ctypes",
        "subprocess",
        "triton",
        "tvm_ffi",
        "torch.cuda",
        "torch.utils.cpp_extension",
        "torch.distributed.distributed_c10d",
    ),
    *("torch.distributed.rendezvous", "sglang.srt.distributed", "sglang.srt.environ", "sglang.srt.layers.dp_attention"),
    *(
        "sglang.srt.layers.moe.utils",
        "sglang.srt.models.registry",
        "sglang.srt.runtime_context",
        "sglang.srt.server_args",
    ),
)


@dataclass(frozen=True)
class Phase:
    """What a witness is doing. `speakers`: the modules of the code under test whose exceptions are verdicts then, if any."""

    name: str
    speakers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ending:
    """The phase that a witness ended in; what it raised, if anything; and whether that is a verdict on the checkpoint."""

    phase: str
    said: str = ""
    verdict: bool = False

    def save(self, path: Path) -> None:
        """Writes it as JSON, at once."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self)))
        part.rename(path)

    @staticmethod
    def load(path: Path) -> Ending:
        """What `save` wrote; a process that wrote nothing ended while it imported what it needs."""
        return Ending(**json.loads(path.read_text())) if path.exists() else Ending("importing what it needs")


class PhaseLog:
    """Keeps `Ending` up to date at `path`: the phase as it is entered, and, used as a context, the exception that leaves it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._phase = Phase("starting")

    def enter(self, phase: Phase) -> None:
        """Notes that a phase begins."""
        self._phase = phase
        Ending(phase.name).save(self._path)

    def __enter__(self) -> PhaseLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            Ending(self._phase.name, described(error), is_verdict(error, self._phase)).save(self._path)


def ending_path(report: Path) -> Path:
    """Where the witness that is to write `report` notes how it ended."""
    return report.with_suffix(".ending")


def how_it_ended(code: int) -> str | None:
    """The exit code of a process in words; None when it ended well. A kernel short of memory kills with SIGKILL."""
    if code == 0:
        return None
    if code > 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}" + (
        ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    )


def described(error: BaseException) -> str:
    """An exception in a few lines, with the place that it came from."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    lines = lines if len(lines) <= 8 else [*lines[:4], *lines[-4:]]
    at = traceback.extract_tb(error.__traceback__)[-1:]
    return "\n".join([*lines, *(f"  at {frame.filename}, line {frame.lineno}, in {frame.name}" for frame in at)])


def is_verdict(error: BaseException, phase: Phase) -> bool:
    """Whether the code under test raised this, of the checkpoint that it was given."""
    if any(_is_of_the_machine(one) for one in _chain(error)):
        return False
    theirs = _beyond_ours(error)
    names = [str(frame.f_globals.get("__name__", "")) for frame in theirs]
    importing = any(frame.f_code.co_name == "<module>" for frame in theirs)
    in_machinery = any(_is_within(name, _MACHINERY) for name in names)
    return not importing and not in_machinery and any(_is_within(name, phase.speakers) for name in names)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was raised from or instead of; of torch's CheckpointException also what ranks raised."""
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
    """The frames of the code that ours called last, outermost first; none where ours raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    kept = [
        frame
        for at, frame in enumerate(frames)
        if not (_is_ours(frame) and frame.f_code.co_name in _AROUND_CALLS and at + 1 < len(frames))
    ]
    last = max((at for at, frame in enumerate(kept) if _is_ours(frame)), default=-1)
    return kept[last + 1 :]


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
