"""Has a real engine load a checkpoint, in one process a rank. The answer has one report, or the reason for none."""

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
    """Loads a subject into a real engine, on GPUs (NCCL) if there is one for each rank, otherwise on the CPU (gloo).

    Raises CannotCheck if the engine is missing, would use a class or a layout that ckptkit does not know, or would lack
    tensors that no Megatron model holds; CkptkitError for a config of no supported family.
    """
    release = require(engine, subject)
    config = config_of(subject)
    check_class(engine, config)
    check_passthrough(engine, subject, config)
    run = _load(engine, subject)
    if run.report is None and engine.without_gpu and not _gpus():
        second = _load(engine, subject, dict(engine.without_gpu))
        run = second if second.report is not None else run
    failure = run.failure
    if failure is None or not failure.verdict or release in engine.tested or _gpus():
        return run
    # An untested release may fail without a GPU because of the way in which ckptkit builds models there.
    tested = ", ".join(engine.tested)
    message = f"{engine.label} {release} fails (without a GPU ckptkit is tested with {tested}): {failure.message}"
    return replace(run, failures={0: replace(failure, verdict=False, message=message)})


def _load(engine: EngineFacts, subject: Subject, variables: Mapping[str, str] | None = None) -> Answer[LoadReport]:
    source = subject.source_path if subject.kind == "megatron" and subject.source_is_hf else None
    if source is not None and is_quantized(read_config(source)):
        source = None
    sizes = engine_sizes(engine, subject) or ONE_RANK
    job = LoadJob(engine.adapter, subject.path, hf=subject.hf_path, source=source, sizes=sizes)
    jobs = {rank: replace(job, rank=rank) for rank in range(job.sizes.ranks)}
    interpreter = replace(interpreter_of(engine, subject), variables=variables or {})
    answer = ask_ranks(jobs, _WITNESS, LoadReport, time_limit(subject.checkpoint.specs), interpreter)
    return outcome(answer, len(jobs))


def interpreter_of(engine: EngineFacts, subject: Subject) -> Interpreter:
    return Interpreter(python_of(engine.name, subject.options.pythons), engine.hidden)


def require(engine: EngineFacts, subject: Subject) -> str:
    """The release of an engine. Raises CannotCheck if it is missing, UsageError for a Python that does not run."""
    interpreter = interpreter_of(engine, subject)
    if (release := interpreter.release(engine.name)) is None:
        where = f"in the environment of {interpreter.path}" if interpreter.is_external else "here"
        raise CannotCheck(f"{engine.label} is not installed {where}: {engine.install}")
    return release


def _gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def engine_sizes(engine: EngineFacts, subject: Subject) -> EngineSizes | None:
    """The requested sizes as an engine has them, or None if it has no such sizes."""
    tp, ep, pp = subject.tp, subject.ep, subject.options.pp
    etp = subject.options.etp or tp // ep
    possible = (engine.stages or pp == 1) and tp % ep == 0 and etp == tp // ep
    if not possible or not (engine.shares_experts or ep in (1, tp)):
        return None
    return EngineSizes(tp, ep, engine.attention_whole and subject.options.dp_attention and tp > 1, pp)


def outcome(answer: Answer[LoadReport], ranks: int) -> Answer[LoadReport]:
    """Merges the answers of all ranks. The failure is the reason for no report, or for no draft model in it."""
    reports = [*answer.reports.values()]
    merged = {0: LoadReport.merged(reports)} if len(reports) == ranks else {}
    if merged and (merged[0].draft_model is not None or not merged[0].draft):
        return Answer(merged, {})
    rank = answer.failing_rank
    failure = answer.failures[rank]
    return Answer(merged, {0: failure if ranks == 1 else replace(failure, message=f"rank {rank}: {failure.message}")})


def check_class(engine: EngineFacts, config: Mapping[str, Any]) -> None:
    """Raises CannotCheck unless the engine must choose the class that ckptkit knows."""
    # For other names an engine uses transformers' class, and to find it runs files of the checkpoint (`auto_map`).
    expected, actual = family_of(config).architectures, config.get("architectures")
    if actual not in [[name] for name in expected]:
        other = f"architectures in config.json is {actual!r:.80} instead of ['{expected[0]}']"
        raise CannotCheck(f"{other}: {engine.label} would run another class, or code of the checkpoint")


def check_passthrough(engine: EngineFacts, subject: Subject, config: Mapping[str, Any]) -> None:
    """Raises CannotCheck for a Megatron checkpoint of a vision model without the tensors of its tower."""
    carried = family_of(config).passthrough
    if subject.kind == "hf" or not carried or "vision_config" not in config:
        return
    opened = open_megatron(subject.location, subject.hf_path)
    if passthrough_beside(opened, opened.hf, subject.location.root, plain) is None:
        lacking = f"the checkpoint has no {carried[0]}*, nor has a folder next to it or {opened.hf_path}"
        raise CannotCheck(f"{lacking}: pass the release with its weights as --hf")
