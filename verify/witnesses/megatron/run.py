"""Starts the ranks of a Megatron witness, in one process each, and collects their reports."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.hybrid_model import hybrid_dims, needs_release
from ckptkit.converters.megatron.parallel import ParallelSizes, check_sizes, default_etp, with_chunks, with_remainder
from ckptkit.converters.planner import HYBRID, MCORE, dialect_of, dims_of, to_megatron
from ckptkit.converters.registry import unwitnessed
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.specs import ranges
from ckptkit.formats.detect import tracker_fault
from ckptkit.formats.hf.side_files import main_dtype
from ckptkit.formats.torch_dist.foreign_names import refuse_foreign_names
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.transfer.copy import cores
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.expected import config_of
from ckptkit.verify.quirks import quirks
from ckptkit.verify.witnesses.megatron.job import RankJob, RankReport
from ckptkit.verify.witnesses.process.interpreter import Interpreter, python_of
from ckptkit.verify.witnesses.process.sandbox import free_memory
from ckptkit.verify.witnesses.reference.job import Ids, Judged, Reference
from ckptkit.verify.witnesses.reference.run import check_reference, judged_by_transformers
from ckptkit.verify.witnesses.runner import Answer, ask_ranks, inconclusive, time_limit

_TRAINER = "Megatron-LM's load_checkpoint"
_WITNESS = "ckptkit.verify.witnesses.megatron.process"  # the module that ranks run
_TOGETHER = 8  # the largest process group that is started
_PROCESS = 700 << 20  # bytes of a rank in addition to weights: torch, Megatron and their buffers
_COPIES = 2  # of a rank's weights, while Megatron joins gate and up
# Options that Megatron-LM refuses together with a layer pattern.
_REFUSED = ("--pipeline-layout", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
_LAYER = re.compile(r"decoder\.layers\.\d+\.")


@dataclass(frozen=True)
class MegatronRun:
    sizes: ParallelSizes
    device: str
    reports: Sequence[RankReport]
    failures: Mapping[int, str]  # Megatron's exceptions about the checkpoint, on the ranks that failed first
    unable: str | None = None  # the reason why Megatron did not run, which is not a verdict on the checkpoint
    not_found: str | None = None  # the reason why a trainer would load another checkpoint or none


def sizes_of(subject: Subject) -> ParallelSizes:
    """The requested parallel sizes. Raises CannotCheck for an HF directory or without Megatron, or CkptkitError."""
    if subject.kind == "hf":
        raise CannotCheck("an HF directory: convert it (`ckptkit convert`), then verify the result with --source")
    megatron = megatron_interpreter(subject)
    if not megatron.has("megatron") or not megatron.has("megatron.core"):
        raise CannotCheck("megatron-core is not installed: pip install megatron-core")
    if (message := unwitnessed(config_of(subject))) is not None:
        raise CannotCheck(message)
    dims = dims_of(config_of(subject))
    if dims.qk_norm_full and subject.tp > dims.groups:
        raise CannotCheck(
            f"verify cannot split this model's norms over more than {dims.groups} ranks: pass less as --tp"
        )
    options = subject.options
    refused = [option for option in options.of_megatron if option in _REFUSED]
    if refused and subject.megatron_files.hybrid:
        hint = (
            "pass --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers, in layers of HybridModel"
        )
        raise UsageError(f"Megatron-LM refuses {', '.join(refused)} for this HybridModel", hint)
    etp = default_etp(subject.tp, subject.ep) if options.etp is None else options.etp
    sizes = ParallelSizes(
        subject.tp,
        options.pp,
        subject.ep,
        etp if dims.experts else 1,
        options.vpp,
        options.decoder_first_pipeline_num_layers,
        options.decoder_last_pipeline_num_layers,
        options.account_for_embedding_in_pipeline_split,
        options.account_for_loss_in_pipeline_split,
        options.pipeline_layout,
        options.cp,
    )
    staged = staged_dims(subject)
    sizes = with_remainder(with_chunks(sizes), staged.layers)
    check_sizes(sizes, staged)
    if beyond := [rank for rank in options.ranks if not 0 <= rank < sizes.world]:
        message = f"--ranks is {ranges(beyond).strip('{}')}, but {sizes} has {sizes.world} rank(s)"
        raise CkptkitError(message, f"choose ranks from 0 to {sizes.world - 1}")
    return sizes


def staged_dims(subject: Subject) -> ModelDims:
    """The model's sizes with the layers that Megatron divides over stages, twice as many for HybridModel."""
    dims = dims_of(config_of(subject))
    return hybrid_dims(dims) if subject.megatron_files.hybrid else dims


def megatron_interpreter(subject: Subject) -> Interpreter:
    return Interpreter(python_of("megatron", subject.options.pythons))


@once
def run_megatron(subject: Subject) -> MegatronRun:
    """Loads the checkpoint of `subject` into real Megatron, in one process for each rank of its parallel sizes.

    On GPUs (NCCL) if there are enough of them, otherwise on the CPU: in one process group (gloo) if the ranks are few
    and fit, otherwise each by itself, a few at a time. Raises as `sizes_of`, and CkptkitError for an invalid source.
    """
    sizes = sizes_of(subject)
    _check_release(subject)
    refuse_foreign_names(subject.location.path, subject.megatron_files.metadata)
    if subject.source is not None and subject.source_is_hf:
        to_megatron(subject.source, str(subject.source_path))
    trainer = subject.options.trainer_loader
    ranks = subject.options.ranks or range(sizes.world)
    gpu = not subject.options.ranks and not trainer and _on_gpus(sizes)
    at_once = 0
    if not gpu:
        each = bytes_a_rank(subject.checkpoint, staged_dims(subject), sizes)
        is_group = not subject.options.ranks and fits_together(sizes.world, each)
        at_once = 0 if is_group else ranks_at_once(each)
    if trainer:
        _check_trainer(subject, sizes, at_once)
        if reason := tracker_fault(subject.location.path):
            return MegatronRun(sizes, _TRAINER, [], {}, not_found=reason)
    root = subject.location.path.parent if trainer else None
    job = replace(_job(subject, sizes, gpu), at_once=at_once, trainer=root)
    turns = math.ceil(len(ranks) / at_once) if at_once else 1
    answer = _ask_megatron(subject, job, ranks, turns * time_limit(subject.checkpoint.specs))
    reports = [] if answer.failures else list(answer.reports.values())
    if (at_once or trainer) and len(ranks) == sizes.world:
        reports = _with_missing(reports, subject)
    verdicts = {rank: failure.message for rank, failure in answer.failures.items() if failure.verdict}
    unable = str(_inconclusive(answer)) if answer.failures and not verdicts else None
    return MegatronRun(sizes, _device(job, gpu), reports, verdicts, unable)


def _check_trainer(subject: Subject, sizes: ParallelSizes, at_once: int) -> None:
    """Raises CannotCheck if Megatron-LM's `load_checkpoint` is missing, or cannot run in this layout."""
    if not megatron_interpreter(subject).has("megatron.training"):
        hint = "install megatron-core 0.19 or later on Python 3.12, or leave out --trainer-loader"
        raise CannotCheck(f"{_TRAINER} is not installed: {hint}")
    if sizes != ParallelSizes(sizes.tp, sizes.pp, sizes.ep, sizes.etp):
        raise CannotCheck(f"{_TRAINER} supports only --tp, --pp, --ep, --etp and even stages, not {sizes}")
    if at_once:
        why = f"{_TRAINER} needs all {sizes.world} rank(s) in memory at once"
        raise CannotCheck(f"{why}: leave out --ranks, or choose sizes with fewer ranks")


def bytes_a_rank(checkpoint: Checkpoint, dims: ModelDims, sizes: ParallelSizes) -> int:
    """An upper estimate of a rank's memory, for the longest stage with the embedding, and complete chunks on disk."""
    longest = max(sum(map(len, chunks)) for chunks in sizes.pipeline(dims).stages) / dims.layers
    held, largest = 0.0, 0
    for name, spec in checkpoint.specs.items():
        cut = sizes.etp * sizes.ep if ".experts.experts." in name else sizes.tp
        held += spec.nbytes / cut * (longest if _LAYER.match(name) else 1)
        largest = max(largest, spec.nbytes)
    return int(_COPIES * held) + 2 * largest + _PROCESS


def ranks_at_once(each: int) -> int:
    """The number of ranks of `each` bytes that may run at a time: at most one a core, and at least one."""
    return max(1, min(cores(), free_memory() // each))


def fits_together(world: int, each: int) -> bool:
    """Whether all ranks may run at a time, in one process group."""
    return world == 1 or (world <= _TOGETHER and world * each <= free_memory())


def _with_missing(reports: Sequence[RankReport], subject: Subject) -> list[RankReport]:
    """Adds the keys on disk that no rank requested, which Megatron reports only in a process group."""
    stored = TorchDistCheckpoint(subject.location.path, hf=subject.hf_path).metadata
    disk = {*stored.tensors, *(key.partition("/shard_")[0] for key in stored.objects)} - {"common_state"}
    missing = disk.difference(*(report.asked for report in reports))
    return [replace(report, missing=tuple(sorted(missing))) for report in reports]


def _check_release(subject: Subject) -> None:
    """Raises CannotCheck for tensors or a model that the installed megatron-core does not support."""
    dialect = dialect_of(config_of(subject), subject.checkpoint.specs)
    if (layout := subject.megatron_files.metadata.layout) != "torch_dist":
        raise CannotCheck(f"the checkpoint has keys of {layout}: convert it to HF, and that to Megatron's torch_dist")
    if dialect not in (MCORE, HYBRID):
        raise CannotCheck(f"the tensors belong to modules of {dialect}, which megatron-core does not have")
    dims, found = dims_of(config_of(subject)), str(megatron_interpreter(subject).release("megatron-core"))
    release = tuple(map(int, found.split(".")[:2]))
    for feature, (major, minor) in needs_release(dims, subject.options.vpp) if dialect == HYBRID else ():
        if release < (major, minor):
            raise CannotCheck(f"megatron-core {found}'s HybridModel has no {feature}: install {major}.{minor} or later")
    is_about = {"indexer-rows": dims.indexer, "query-norm": dims.mla and dims.mla.q_rank is None}
    for known in quirks("megatron", "refuses", found):
        if is_about[known.id]:
            raise CannotCheck(known.message.format(release=found))


@dataclass(frozen=True)
class Computed:
    version: str
    sizes: ParallelSizes
    device: str
    dtype: str  # of the computation
    answers: Mapping[int, Sequence[Judged]]  # by rank of the last pipeline stage
    reference: Reference | None  # or None if some answers are not finite


def computes_in(subject: Subject) -> Sequence[str]:
    """The dtypes in which Megatron computes: float32, and on GPUs also the checkpoint's own."""
    stored = main_dtype(subject.checkpoint.specs) or "bfloat16"
    return ["float32", stored] if stored != "float32" and _on_gpus(sizes_of(subject)) else ["float32"]


def _not_computed(dims: ModelDims) -> str | None:
    """The reason why Megatron cannot compute a model, or None. Layers of `variants` only hold weights."""
    own = "trainers add their own layers"
    reasons = {
        "Megatron's Mamba layer needs CUDA kernels (mamba_ssm)": dims.mamba is not None,
        "Megatron's gated delta net needs CUDA kernels (flash-linear-attention)": dims.linear is not None,
        "Megatron's sparse attention needs a CUDA kernel (fast_hadamard_transform)": dims.indexer is not None,
        f"megatron-core has no norms after attention and MLP: {own}": bool(dims.sandwich),
        f"megatron-core has no query and key norms over all heads at once: {own}": dims.qk_norm_full,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def run_megatron_logits(subject: Subject, prompts: Ids, dtype: str) -> Computed:
    """Megatron's answers to prompts (token ids) in the requested sizes, computed in `dtype`, and transformers' answers.

    Its layers have Megatron's own spec in float32, otherwise Transformer Engine's if that is installed. Raises
    CannotCheck if either cannot answer, which is not a verdict on the checkpoint, and as `run_megatron`.
    """
    from ckptkit.verify.witnesses.reference.distance import not_finite_logprobs

    sizes = sizes_of(subject)
    if reason := _not_computed(dims_of(config_of(subject))):
        raise CannotCheck(f"{reason}; leave out --against-megatron, so that --logits runs transformers only (CK607)")
    _check_release(subject)
    check_reference(subject, prompts)
    refuse_foreign_names(subject.location.path, subject.megatron_files.metadata)
    gpu = _on_gpus(sizes)
    job = _job(subject, sizes, gpu)
    job = replace(job, dtype=dtype, prompts=prompts, transformer_engine=job.transformer_engine and dtype != "float32")
    answer = _ask_megatron(subject, job, range(sizes.world), time_limit(subject.checkpoint.specs, passes=4))
    if answer.failures:
        raise _inconclusive(answer)
    answers = {rank: report.judged for rank, report in answer.reports.items() if report.judged}
    reference = None
    if not any(not_finite_logprobs(judged)[0] for judged in answers.values()):
        top_ids = [answer.top_ids for answer in min(answers.items())[1]]
        reference = judged_by_transformers(subject, prompts, top_ids)
    return Computed(answer.reports[0].version, sizes, _device(job, gpu), dtype, answers, reference)


def _on_gpus(sizes: ParallelSizes) -> bool:
    import torch

    return torch.cuda.device_count() >= sizes.world


def _device(job: RankJob, gpu: bool) -> str:
    spec = "Transformer Engine spec" if job.transformer_engine else "local spec"
    if job.trainer:
        return f"{_TRAINER}, gloo on the CPU, {spec}"
    if job.at_once:
        return f"the CPU, ranks without a process group and {job.at_once} at a time, {spec}"
    return f"{'NCCL on GPUs' if gpu else 'gloo on the CPU'}, {spec}"


def _inconclusive(answer: Answer[RankReport]) -> CannotCheck:
    rank, failure = min(answer.failures.items())
    return inconclusive(f"rank {rank} failed", failure)


def _job(subject: Subject, sizes: ParallelSizes, gpu: bool) -> RankJob:
    return RankJob(
        checkpoint=subject.location.path,
        hf=subject.hf_path,
        source=subject.source_path,
        sizes=sizes,
        dtype=main_dtype(subject.checkpoint.specs) or "bfloat16",
        transformer_engine=gpu and megatron_interpreter(subject).has("transformer_engine"),
        hybrid=subject.megatron_files.hybrid,
        gpu=gpu,
    )


def _ask_megatron(subject: Subject, job: RankJob, ranks: Sequence[int], limit_s: float) -> Answer[RankReport]:
    """The answer of these ranks. On the CPU they are forked after the slow import of Megatron; CUDA allows no fork."""
    jobs = {rank: replace(job, rank=rank) for rank in ranks}
    return ask_ranks(jobs, _WITNESS, RankReport, limit_s, megatron_interpreter(subject), together=not job.gpu)
