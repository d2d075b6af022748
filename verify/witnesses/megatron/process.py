"""Ranks of a real Megatron that load a checkpoint: `python -m ckptkit.verify.witnesses.megatron.process JOB.json...`.

A rank builds the model of its job, poisons every parameter, loads strictly with Megatron's own `dist_checkpointing`,
and compares its parameters with slices of the reference. An exception ends it and is in the phase log.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptkit.converters.megatron.module_names import global_name
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.converters.open import open_megatron
from ckptkit.converters.planner import HYBRID, MCORE, Rule, dialect_of, dims_of, rules_of, to_hf, to_megatron
from ckptkit.converters.stored import adapt_config
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.isolation import end_with_parent
from ckptkit.formats.detect import locate
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.witnesses.loading.bits import poison
from ckptkit.verify.witnesses.megatron.imports import importing_megatron
from ckptkit.verify.witnesses.megatron.job import RankJob, RankReport, TensorSeen
from ckptkit.verify.witnesses.megatron.slices import Position, compare_all, layers_of_chunk
from ckptkit.verify.witnesses.process import codec
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase
from ckptkit.verify.witnesses.reference.job import Judged, judged_logits

with importing_megatron():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.package_info import __version__
    from megatron.core.transformer.moe import moe_utils

    from ckptkit.verify.witnesses.megatron import loaders, model
    from ckptkit.verify.witnesses.megatron.loaders import WatchedLoad
    from ckptkit.verify.witnesses.megatron.model import Chunk, build_chunks, connect


def reference_tensors(source: Path, hf: Path | None, dialect: str = MCORE) -> Checkpoint:
    """The global Megatron tensors to compare with, named as in `dialect`, of an HF directory or a Megatron one."""
    location = locate(source)
    if location.kind == "hf":
        return to_megatron(plain(location.path), str(source), dialect=dialect)
    opened = open_megatron(location, hf)
    if dialect_of(opened.config, opened.specs) == dialect:
        return opened
    return to_megatron(to_hf(opened, str(source)), str(source), dialect=dialect)


def held_by(chunk: Chunk) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, sharing memory with the model."""
    state = chunk.state_dict().items()
    return {name: one for name, one in state if isinstance(one, Tensor) and not name.endswith("_extra_state")}


LOAD = Phase("loading the weights", ("megatron", "torch"))
COMPARE = Phase("comparing what was loaded")


def load_chunks(
    chunks: list[Chunk],
    checkpoint: str,
    enter: Callable[[Phase], None] = lambda phase: None,
    reader: WatchedLoad | None = None,
) -> tuple[int, set[str], set[str], list[str]]:
    """Loads with Megatron.

    Returns the number of requested keys, the keys on disk that no rank requested, the requested keys that the disk
    lacks, and the names that `load_state_dict` refused. For a rank that runs alone the second set is empty.
    """
    reader = reader or WatchedLoad()
    enter(LOAD)
    common = dist_checkpointing.load_common_state_dict(checkpoint)
    metadata: dict[str, Any] = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    enter(Phase("asking the model which keys it wants"))
    wanted = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}
    requested = sum(1 for _ in nested_values(wanted))
    enter(LOAD)
    # `return_all` reports the faults for which `raise_all` stops, on all ranks, so that values can be compared too.
    loaded, missing, unexpected = dist_checkpointing.load(
        wanted,
        checkpoint,
        reader,
        validate_access_integrity=not reader.alone,
        strict="return_unexpected" if reader.alone else "return_all",
    )
    refused: list[str] = []
    for index, chunk in enumerate(chunks):
        outcome = chunk.load_state_dict(loaded[f"model{index}"], strict=False)
        refused += [*outcome.missing_keys, *outcome.unexpected_keys]
    return requested, missing, unexpected, refused


def seen(chunks: list[Chunk], rules: Mapping[str, Rule], reference: Checkpoint, at: Position) -> Iterator[TensorSeen]:
    for chunk in chunks:
        name_of = partial(global_name, layers=layers_of_chunk(chunk), experts=at.experts, rules=rules)
        yield from compare_all(held_by(chunk), name_of, rules, reference, at)


def witness(job: RankJob, enter: Callable[[Phase], None]) -> RankReport:
    """Runs one rank and returns its report. Raises Megatron's exceptions."""
    enter(Phase("opening the checkpoint and its reference"))
    checkpoint = TorchDistCheckpoint(job.checkpoint, hf=job.hf)
    config = adapt_config(checkpoint.config, checkpoint.specs)
    dims = dims_of(config)
    dialect = HYBRID if job.hybrid else MCORE
    reference: Checkpoint = reference_tensors(job.source, job.hf, dialect) if job.source else checkpoint
    enter(Phase("joining the process groups"))
    if job.at_once:
        loaders.connect_alone(job.sizes, job.rank)
    else:
        connect(job.sizes, job.rank, str(Path(job.report).with_name("store")))
    enter(Phase("building the model"))
    build = model.MegatronBuild(job.sizes, getattr(torch, job.dtype), job.transformer_engine, job.hybrid)
    chunks = build_chunks(dims, build)
    for chunk in chunks:
        poison(held_by(chunk).values())
    reader = WatchedLoad(alone=bool(job.at_once))
    if job.trainer:  # it raises for keys that the disk lacks
        enter(Phase("importing Megatron-LM's training package"))
        loaders.import_loader()
        with loaders.pretend_gpu():
            enter(Phase("parsing Megatron-LM's arguments"))
            args = loaders.arguments_for(dims, job)
            enter(LOAD)
            refused = loaders.load_as_trainer(chunks, args, reader)
        requested, missing, unexpected = len(reader.asked), set[str](), set[str]()
    else:
        requested, missing, unexpected, refused = load_chunks(chunks, str(job.checkpoint), enter, reader)
    enter(COMPARE)
    rules = {rule.megatron: rule for rule in rules_of(config, dialect)}
    at = Position.here(dims.experts, not job.transformer_engine)
    enter(Phase("computing log-probabilities"))
    answers = _answers(chunks, job, dims.vocab)
    enter(COMPARE)
    return RankReport(
        rank=job.rank,
        version=__version__.partition("+")[0],  # a source tree adds the commit of the directory that it runs in
        tp=at.tp_rank,
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        layers=tuple(layers_of_chunk(chunk) for chunk in chunks),
        requested=requested,
        missing=tuple(sorted(missing)),
        unexpected=tuple(sorted(unexpected)),
        refused=tuple(refused),
        tensors=() if job.prompts else tuple(seen(chunks, rules, reference, at)),
        judged=answers,
        mtp=tuple(len(chunk.mtp.layers) if model.has_mtp(chunk) else 0 for chunk in chunks),
        asked={key: tuple(boxes) for key, boxes in reader.asked.items()},
        renamed=tuple(sorted(reader.renamed.values())),
    )


def _answers(chunks: list[Chunk], job: RankJob, vocabulary: int) -> tuple[Judged, ...]:
    """The ranks' log-probabilities for the prompts; empty on a rank without the output layer."""
    if not job.transformer_engine:
        # With Transformer Engine installed, all routers call its `general_gemm` (`RouterGatingLinearFunction`), which
        # rounds factors in float32 to TF32, with 10 bits of mantissa, and does not run on a CPU.
        moe_utils.te_general_gemm = None
    answers = ((prompt, _forward(chunks, job.sizes, prompt)) for prompt in job.prompts)
    return tuple(judged_logits(logits[:, :vocabulary], prompt) for prompt, logits in answers if logits is not None)


def _run(job: RankJob) -> None:
    report = Path(job.report)
    with ExitReport(report) as phases:
        codec.save(witness(job, phases.enter), report)
    torch.distributed.destroy_process_group()


def _forked(job: RankJob, log: Path, parent: int) -> None:
    """Runs one of several ranks in a separate process, which prints into the caller's log."""
    end_with_parent(parent)
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    _run(job)


def _fork(jobs: Sequence[RankJob], folder: Path) -> None:
    """Runs several ranks, at most `at_once` at a time, and writes their exit codes; after a failure none is started."""
    context = multiprocessing.get_context("fork")
    processes = {
        job.rank: context.Process(target=_forked, args=(job, folder / f"log-{job.rank}", os.getpid()), daemon=True)
        for job in jobs
    }
    at_once = jobs[0].at_once or len(jobs)
    if jobs[0].trainer:
        loaders.import_loader()
    waiting, running = list(processes), dict[int, int]()
    while running or waiting:
        for rank in waiting[: at_once - len(running)]:
            waiting.remove(rank)
            processes[rank].start()
            running[processes[rank].sentinel] = rank
        ended = multiprocessing.connection.wait(list(running))
        for rank in [running.pop(sentinel) for sentinel in list(running) if sentinel in ended]:
            processes[rank].join()
            (folder / f"partial-{rank}").write_text(str(processes[rank].exitcode))
            (folder / f"partial-{rank}").rename(folder / f"exit-{rank}")
            waiting = [] if processes[rank].exitcode else waiting


def _forward(chunks: Sequence[Chunk], sizes: ParallelSizes, prompt: Sequence[int]) -> Tensor | None:
    """Logits [tokens, padded vocabulary] of a prompt (token ids) on ranks of the last pipeline stage, else None.

    Every rank must call it. Hidden states [tokens, 1, hidden size] go from one stage to the next by a broadcast among
    the ranks of a pipeline; virtual stage `v` of rank `p` has the number `v * pp + p`.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks, here = torch.distributed.get_process_group_ranks(group), parallel_state.get_pipeline_model_parallel_rank()
    like = next(chunks[0].parameters())
    tokens = torch.tensor([prompt], device=like.device)
    hidden = torch.empty(len(prompt), 1, chunks[0].config.hidden_size, dtype=like.dtype, device=like.device)
    last = sizes.pp * sizes.vpp - 1
    for number in range(last):
        virtual, rank = divmod(number, sizes.pp)
        if rank == here:
            chunks[virtual].set_input_tensor(hidden if number else None)
            with torch.no_grad():
                hidden = chunks[virtual](tokens, *model.inputs_of(tokens)).contiguous()
        torch.distributed.broadcast(hidden, ranks[rank], group=group)
    if here != sizes.pp - 1:
        return None
    chunks[-1].set_input_tensor(hidden if last else None)
    return model.logits(chunks[-1], tokens)[0]


def main() -> None:
    jobs = [codec.load_record(RankJob, Path(word)) for word in sys.argv[1:]]
    if len(jobs) == 1:
        _run(jobs[0])
    else:
        _fork(jobs, Path(sys.argv[1]).parent)


if __name__ == "__main__":
    main()
