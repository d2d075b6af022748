"""Starts a live engine in a separate process, and returns its report or the reason for none."""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.core.specs import summarize
from ckptkit.formats.hf.reader import read_config
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.expected import config_of
from ckptkit.verify.witnesses.live.job import FIRST, EngineJob, EngineReport
from ckptkit.verify.witnesses.loading.engine import EngineFacts
from ckptkit.verify.witnesses.loading.job import EngineSizes
from ckptkit.verify.witnesses.loading.names import draft_names
from ckptkit.verify.witnesses.loading.run import check_class, engine_sizes, interpreter_of, require
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.reference.activations import group_of
from ckptkit.verify.witnesses.reference.job import Ids, Reference, ReferenceJob
from ckptkit.verify.witnesses.reference.prediction import texts_of, tokenizer_of
from ckptkit.verify.witnesses.reference.run import check_reference, prompts_of, run_reference
from ckptkit.verify.witnesses.registry import live_engine
from ckptkit.verify.witnesses.runner import ask, inconclusive, time_limit

_WITNESS = "ckptkit.verify.witnesses.live.process"
_PASSES = 8  # over the weights, at most


@dataclass(frozen=True)
class EngineRun:
    report: EngineReport | None  # may be incomplete
    prompts: Ids = ()
    failed: ExitReport | str | None = None  # the reason why the report is missing or incomplete

    def require_report(self) -> EngineReport:
        """The report. Raises CannotCheck if it is missing."""
        if self.report is None:
            raise CannotCheck(str(self.failed or "the engine wrote no report"))
        return self.report


@once
def run_engine(subject: Subject) -> EngineRun:
    """Serves the subject with a real engine and runs the requested steps. Raises CannotCheck if it cannot."""
    return _served(subject, draft=False)


@once
def run_draft_engine(subject: Subject) -> EngineRun | None:
    """Loads weights again with a draft model of the checkpoint, or returns None without one. Raises CannotCheck."""
    if not running_engine(subject).updates_draft or not draft_names(config_of(subject), subject.checkpoint.specs):
        return None
    return _served(subject, draft=True)


def running_engine(subject: Subject) -> EngineFacts:
    return live_engine(subject.against)


def _served(subject: Subject, draft: bool) -> EngineRun:
    engine = running_engine(subject)
    sizes = _sizes(engine, subject)
    config = config_of(subject)
    check_class(engine, config)
    logits = "logits" in subject.against and not draft
    reloads = no_second_load(subject) is None
    prompts = [] if draft else prompts_of(config, logits)
    job = EngineJob(
        str(subject.path),
        prompts,
        sizes=sizes,
        update=reloads and "update" in subject.against,
        release_resume=reloads and "release-resume" in subject.against,
        draft=draft,
        adapter=engine.live,
    )
    limit_s = time_limit(subject.checkpoint.specs, _PASSES)
    answer = ask(job, _WITNESS, EngineReport, limit_s, interpreter_of(engine, subject))
    if answer.report is not None:
        return EngineRun(answer.report, prompts, answer.failure)
    check = f"try `ckptkit verify` --against-{engine.name}, which loads the weights without serving them"
    return EngineRun(None, failed=f"{inconclusive('the engine gave no answer', answer.failure)}; {check}")


@once
def no_second_load(subject: Subject) -> str | None:
    """The reason, known before the start, why the engine cannot be updated with this checkpoint, or None."""
    engine = running_engine(subject)
    if not (names := engine.not_reloadable(subject.hf_files.specs)):
        return None
    return (
        f"not tried, since {engine.label} loads INT4 layers other than routed experts only once: "
        f"{summarize(names)}; quantize only experts to INT4 (`ckptkit quantize --preset rl`)"
    )


@once
def run_engine_reference(subject: Subject) -> Reference:
    """transformers' answers to the engine's prompts. Raises CannotCheck."""
    run = run_engine(subject)
    report = run.require_report()
    check_reference(subject, run.prompts)
    tokenizer = tokenizer_of(subject.path)
    job = ReferenceJob(
        subject.path,
        prompts=run.prompts,
        top_ids=[answer.top_ids for answer in report.passes[FIRST]],
        texts=texts_of(tokenizer, config_of(subject)) if tokenizer else None,
        activations=group_of(quantization_of(read_config(subject.path)) or {}),
    )
    return run_reference(subject, job)


def _sizes(engine: EngineFacts, subject: Subject) -> EngineSizes:
    """The engine's sizes. Raises CannotCheck unless an engine can serve the subject here."""
    import torch

    on_cpu = engine.cpu_package is not None and interpreter_of(engine, subject).release(engine.cpu_package) is not None
    if not on_cpu:
        require(engine, subject)
    if subject.kind == "megatron":
        raise CannotCheck("an engine serves HF directories: convert this one (`ckptkit convert`) and verify the result")
    if (sizes := engine_sizes(engine, subject)) is None:
        raise CannotCheck(f"{engine.label} does not support these sizes: {engine.sizes}")
    if not on_cpu and torch.cuda.device_count() < sizes.ranks:
        have = torch.cuda.device_count()
        raise CannotCheck(f"an engine needs a GPU for each rank: {sizes.ranks}, but this machine has {have}")
    return sizes
