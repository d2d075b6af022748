"""Has a real engine load a checkpoint, in a process a rank. The answer has one report, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.open import open_megatron
from ckptkit.converters.passthrough import passthrough_beside
from ckptkit.converters.registry import family_of
from ckptkit.formats.hf.reader import read_config
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.expected import config_of, is_quantized
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.witnesses.loading.engine import EngineFacts
from ckptkit.verify.witnesses.loading.job import ONE_RANK, EngineSizes, LoadJob, LoadReport
from ckptkit.verify.witnesses.process.interpreter import Interpreter, python_of
from ckptkit.verify.witnesses.runner import Answer, ask_ranks, time_limit

_WITNESS = "ckptkit.verify.witnesses.loading.process"  # the module that ranks run


@once
def run_engine_load(subject: Subject, engine: EngineFacts) -> Answer[LoadReport]:
    """Loads a subject into a real engine, on GPUs (NCCL) where there is one for each rank, else on the CPU (gloo).

    Raises Unable where the engine is missing, would take a class or a layout that ckptkit does not know, or would
    lack tensors that no Megatron model holds; CkptkitError where the config is of no supported family.
    """
    release = require(engine, subject)
    config = config_of(subject)
    check_class(engine, config)
    check_passthrough(engine, subject, config)
    run = _load(engine, subject)
    if run.report is None and engine.without_gpu and not _gpus():
        again = _load(engine, subject, dict(engine.without_gpu))
        run = again if again.report is not None else run
    failure = run.failure
    if failure is None or not failure.verdict or release in engine.tested or _gpus():
        return run
    # What a release that is not known refuses without a GPU may be how ckptkit builds models there.
    tested = ", ".join(engine.tested)
    why = f"{engine.label} {release} was not tested without a GPU ({tested} were), and fails: {failure.message}"
    return replace(run, failures={0: replace(failure, verdict=False, message=why)})


def _load(engine: EngineFacts, subject: Subject, variables: Mapping[str, str] | None = None) -> Answer[LoadReport]:
    """One load, with these variables in the environment of its processes."""
    source = subject.source_path if subject.is_megatron and subject.source_is_hf else None
    if source is not None and is_quantized(read_config(source)):
        source = None
    sizes = engine_sizes(engine, subject) or ONE_RANK
    job = LoadJob(engine.adapter, subject.path, hf=subject.hf_path, source=source, sizes=sizes)
    jobs = {rank: replace(job, rank=rank) for rank in range(job.sizes.ranks)}
    interpreter = replace(interpreter_of(engine, subject), variables=variables or {})
    answer = ask_ranks(jobs, _WITNESS, LoadReport, time_limit(subject.checkpoint.specs), interpreter)
    return outcome(answer, len(jobs))


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


def engine_sizes(engine: EngineFacts, subject: Subject) -> EngineSizes | None:
    """The sizes asked for, as an engine has them; None where it has no such sizes."""
    tp, ep, pp = subject.tp, subject.ep, subject.options.pp
    etp = subject.options.etp or tp // ep
    possible = (engine.stages or pp == 1) and tp % ep == 0 and etp == tp // ep
    if not possible or not (engine.shares_experts or ep in (1, tp)):
        return None
    return EngineSizes(tp, ep, engine.attention_whole and subject.options.dp_attention and tp > 1, pp)


def outcome(answer: Answer[LoadReport], ranks: int) -> Answer[LoadReport]:
    """The answer of so many ranks as that of one: their merged report, if the model was loaded on all of them.

    Its failure is why there is no report or, with multi-token prediction layers, no draft model in it.
    """
    reports = [*answer.reports.values()]
    merged = {0: LoadReport.merged(reports)} if len(reports) == ranks else {}
    if merged and (merged[0].draft_model is not None or not merged[0].draft):
        return Answer(merged, {})
    rank = answer.to_blame
    failure = answer.failures[rank]
    return Answer(merged, {0: failure if ranks == 1 else replace(failure, message=f"rank {rank}: {failure.message}")})


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
    carried = family_of(config).passthrough
    if subject.is_hf or not carried or "vision_config" not in config:
        return
    opened = open_megatron(subject.location, subject.hf_path)
    if passthrough_beside(opened, opened.hf, subject.location.root, plain) is None:
        raise CannotCheck(
            f"Megatron holds no {carried[0]}*, and neither a folder next to it nor {opened.hf_path} has it: give --hf "
            "the release with its weights"
        )
