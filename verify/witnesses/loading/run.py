"""Has a real engine load a checkpoint, in a process a rank, and turns whatever becomes of it into data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.formats.hf.reader import read_config
from converters.open import open_megatron
from converters.passthrough import passthrough_beside
from converters.registry import family_of
from verify.evidence.expected import config_of, is_quantized
from verify.evidence.plain import plain
from verify.evidence.subject import Subject
from verify.skip import CannotCheck
from verify.witnesses.loading.engine import EngineFacts
from verify.witnesses.loading.job import ONE_RANK, EngineSizes, LoadJob, LoadReport
from verify.witnesses.process.codec import load_record, save
from verify.witnesses.process.interpreter import Interpreter, python_of
from verify.witnesses.process.run import failures_of, run_ranks, time_limit

_WITNESS = "verify.witnesses.loading.process"  # the module that ranks run
_START_S = 900  # importing an engine and building its kernels on a cold machine


@dataclass(frozen=True)
class LoadRun:
    """What became of a load, and of that of the draft model where there are multi-token prediction layers."""

    report: LoadReport | None
    crash: str | None = None  # the engine's refusal
    unable: str | None = None  # why the engine could not be asked
    draft: LoadReport | None = None
    draft_crash: str | None = None  # its refusal to load the draft model
    draft_error: str | None = None  # why it could not be asked about that


@dataclass(frozen=True)
class LoadedBy:
    """Loads a subject into a real engine: `subject.once(LoadedBy(engine))`."""

    engine: EngineFacts

    def __call__(self, subject: Subject) -> LoadRun:
        """On GPUs (NCCL) where there is one for each rank, else on the CPU (gloo).

        Raises CannotCheck where the engine is missing, would take a class or a layout that ckptkit does not know, or
        would lack tensors that no Megatron model holds; CkptkitError where the config is of no supported family.
        """
        release = require(self.engine, subject)
        config = config_of(subject)
        check_class(self.engine, config)
        check_passthrough(self.engine, subject, config)
        run = _load(self.engine, subject)
        if run.report is None and self.engine.without_gpu and not _gpus():
            again = _load(self.engine, subject, dict(self.engine.without_gpu))
            run = again if again.report is not None else run
        refusal = run.crash or run.draft_crash
        if refusal is None or release in self.engine.tested or _gpus():
            return run
        # What a release that is not known refuses without a GPU may be how ckptkit builds models there.
        tested = ", ".join(self.engine.tested)
        why = f"{self.engine.label} {release} was not tested without a GPU ({tested} were), and fails: {refusal}"
        return LoadRun(None, unable=why) if run.crash else LoadRun(run.report, draft_error=why)


def _load(engine: EngineFacts, subject: Subject, variables: Mapping[str, str] | None = None) -> LoadRun:
    """One load, with these variables in the environment of its processes."""
    interpreter = replace(interpreter_of(engine, subject), variables=variables or {})
    with TemporaryDirectory(prefix=f"ckptkit-{engine.name}-") as scratch:
        jobs = _jobs(engine, subject, Path(scratch))
        for job in jobs:
            save(job, Path(scratch, f"job-{job.rank}.json"))
        limit_s = time_limit(_START_S, subject.checkpoint.specs)
        failed = run_ranks(Path(scratch), len(jobs), _WITNESS, limit_s, interpreter)
        logs = [Path(scratch, f"log-{job.rank}") for job in jobs]
        return outcome(failed, [Path(job.report) for job in jobs], logs)


def interpreter_of(engine: EngineFacts, subject: Subject) -> Interpreter:
    """The Python that has an engine."""
    return Interpreter(python_of(engine.name, subject.options.pythons), engine.hidden)


def require(engine: EngineFacts, subject: Subject) -> str:
    """The release of an engine.

    Raises CannotCheck where it is not installed, UsageError for a Python that does not run.
    """
    interpreter = interpreter_of(engine, subject)
    if (release := interpreter.release(engine.name)) is None:
        where = f"in the environment of {interpreter.path}" if interpreter.elsewhere else "here"
        raise CannotCheck(f"{engine.label} is not installed {where}: {engine.install}")
    return release


def _gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def _jobs(engine: EngineFacts, subject: Subject, root: Path) -> list[LoadJob]:
    (root / "scratch").mkdir()
    source = None  # the unquantized HF directory that a Megatron checkpoint's values are compared with
    if subject.is_megatron and subject.source_path and subject.source_is_hf:
        source = None if is_quantized(read_config(subject.source_path)) else str(subject.source_path.absolute())
    first = LoadJob(
        engine.adapter,
        str(subject.path.absolute()),
        hf=str(subject.hf_path.absolute()) if subject.hf_path else None,
        source=source,
        scratch=str(root / "scratch"),
        sizes=engine_sizes(engine, subject) or ONE_RANK,
    )
    return [replace(first, rank=rank, report=str(root / f"report-{rank}.json")) for rank in range(first.sizes.ranks)]


def engine_sizes(engine: EngineFacts, subject: Subject) -> EngineSizes | None:
    """The sizes asked for, as an engine has them; None where it has no such sizes."""
    tp, ep, pp = subject.tp, subject.ep, subject.options.pp
    etp = subject.options.etp or tp // ep
    possible = (engine.stages or pp == 1) and tp % ep == 0 and etp == tp // ep
    if not possible or not (engine.shares_experts or ep in (1, tp)):
        return None
    return EngineSizes(tp, ep, engine.attention_whole and subject.options.dp_attention and tp > 1, pp)


def outcome(failed: Mapping[int, str], reports: Sequence[Path], logs: Sequence[Path]) -> LoadRun:
    """What became of a witness whose ranks were to write `reports`; `failed`: how those ended that did not."""
    report = _merged(reports) if all(report.exists() for report in reports) else None
    if report is not None and not report.draft:
        return LoadRun(report)
    drafts = [LoadReport.draft_path(report) for report in reports]
    if report is not None and all(draft.exists() for draft in drafts):
        return LoadRun(report, draft=_merged(drafts))
    failures = failures_of(failed, dict(enumerate(reports)), dict(enumerate(logs)))
    # The one to blame is the first whose words are a verdict, or the first.
    rank = min(failures, key=lambda one: (not failures[one].ending.verdict, one))
    cause = failures[rank]
    if len(reports) > 1:
        cause = replace(cause, message=f"rank {rank}: {cause.message}")
    if report is None:
        if cause.ending.verdict:
            return LoadRun(None, crash=cause.message)
        return LoadRun(None, unable=f"the witness failed {cause}")
    why = f"while {cause.ending.phase}, {cause.message}"
    if cause.ending.verdict:
        return LoadRun(report, draft_crash=why)
    return LoadRun(report, draft_error=f"the draft model was not looked at: {why}")


def _merged(reports: Sequence[Path]) -> LoadReport:
    from verify.witnesses.loading.merge import merged_reports  # needs torch, which header verbs do not import

    return merged_reports([load_record(LoadReport, report) for report in reports])


def check_class(engine: EngineFacts, config: Mapping[str, Any]) -> None:
    """Raises CannotCheck unless the engine has to choose the class that is known here.

    For a name without a class of its own an engine would take transformers' class, and to find it run the Python files
    that `auto_map` names, which come with the checkpoint.
    """
    wanted, named = family_of(config).architectures, config.get("architectures")
    if named not in [[one] for one in wanted]:
        raise CannotCheck(
            f"config.json has architectures {named!r:.80}, not ['{wanted[0]}']: {engine.label} would run another "
            "class, or code that comes with the checkpoint"
        )


def check_passthrough(engine: EngineFacts, subject: Subject, config: Mapping[str, Any]) -> None:
    """Raises CannotCheck for a Megatron checkpoint of a model with a vision tower that is not at hand.

    The engine builds the tower, and a Megatron language model has no weights for it.
    """
    carried = family_of(config).carried
    if subject.is_hf or not carried or "vision_config" not in config:
        return
    opened = open_megatron(subject.location, subject.hf_path)
    if passthrough_beside(opened, opened.hf, subject.location.root, plain) is None:
        raise CannotCheck(
            f"Megatron holds no {carried[0]}*, and neither a folder beside it nor {opened.hf_path} has it: give --hf "
            "the release with its weights"
        )
