"""Ranks of a real Megatron that load a checkpoint: `python -m ckptkit.verify.witnesses.megatron.process JOB.json...`.

A rank builds the model of its job, poisons every parameter, loads strictly with Megatron's own
`dist_checkpointing`, and compares what it holds with the slices predicted from the reference. An exception ends it; the
phase log says what that means.
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

from ckptkit.converters.config.dims import ModelDims
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
from ckptkit.verify.witnesses.process.exit_report import Phase, PhaseLog
from ckptkit.verify.witnesses.reference.job import Judged, judged_logits

with importing_megatron():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.package_info import __version__
    from megatron.core.transformer.moe import moe_utils

    from ckptkit.verify.witnesses.megatron.model import (
        Chunk,
        MegatronBuild,
        build_chunks,
        connect,
        has_mtp,
        inputs_of,
        logits,
    )
    from ckptkit.verify.witnesses.megatron.recording_loader import WatchedLoad, connect_alone


def reference_tensors(source: Path, hf: Path | None, dialect: str = MCORE) -> Checkpoint:
    """The global Megatron tensors to compare with, named as in `dialect`, of an HF directory or a Megatron one."""
    location = locate(source)
    if location.is_hf:
        return to_megatron(plain(location.path), str(source), dialect=dialect)
    opened = open_megatron(location, hf)
    if dialect_of(opened.config, opened.specs) == dialect:
        return opened
    return to_megatron(to_hf(opened, str(source)), str(source), dialect=dialect)


def held_by(chunk: Chunk) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, sharing memory with the model."""
    state = chunk.state_dict()
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and not name.endswith("_extra_state")
    }


OPEN = Phase("opening the checkpoint and its reference")
CONNECT = Phase("joining the process groups")
IMPORT = Phase("importing Megatron-LM's training package")
ARGUMENTS = Phase("parsing Megatron-LM's arguments")
BUILD = Phase("building the model")
ASK = Phase("asking the model which keys it wants")
LOAD = Phase("loading the weights", ("megatron", "torch"))
COMPARE = Phase("comparing what was loaded")
COMPUTE = Phase("computing log-probabilities")


def load_chunks(
    chunks: list[Chunk],
    checkpoint: str,
    enter: Callable[[Phase], None] = lambda phase: None,
    reader: WatchedLoad | None = None,
) -> tuple[int, set[str], set[str], list[str]]:
    """Loads with Megatron.

    Returns how many keys were requested, the keys on disk that no rank requested, the keys requested that the disk
    lacks, and the names that `load_state_dict` refused.

    `return_all` finds what `raise_all` finds, on all ranks, but goes on, so that values can be compared too. A rank
    that is alone cannot tell what others request: there the keys that none did are empty.
    """
    reader = reader or WatchedLoad()
    enter(LOAD)
    common = dist_checkpointing.load_common_state_dict(checkpoint)
    metadata: dict[str, Any] = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    enter(ASK)
    wanted = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}
    requested = sum(1 for _ in nested_values(wanted))
    enter(LOAD)
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
    """Every parameter of this rank against the reference; `rules` by their Megatron name."""
    for chunk in chunks:
        name_of = partial(global_name, layers=layers_of_chunk(chunk), experts=at.experts, rules=rules)
        yield from compare_all(held_by(chunk), name_of, rules, reference, at)


def witness(job: RankJob, enter: Callable[[Phase], None]) -> RankReport:
    """Runs one rank to its report. Raises whatever Megatron raises."""
    enter(OPEN)
    checkpoint = TorchDistCheckpoint(job.checkpoint, hf=job.hf)
    config = adapt_config(checkpoint.config, checkpoint.specs)
    dims = dims_of(config)
    dialect = HYBRID if job.hybrid else MCORE
    reference: Checkpoint = reference_tensors(job.source, job.hf, dialect) if job.source else checkpoint
    enter(CONNECT)
    if job.at_once:
        connect_alone(job.sizes, job.rank)
    else:
        connect(job.sizes, job.rank, str(Path(job.report).with_name("store")))
    enter(BUILD)
    chunks = build_chunks(dims, MegatronBuild(job.sizes, getattr(torch, job.dtype), job.transformer_engine, job.hybrid))
    for chunk in chunks:
        poison(held_by(chunk).values())
    reader = WatchedLoad(alone=bool(job.at_once))
    if job.trainer:
        requested, missing, unexpected, refused = _load_as_trainer(chunks, dims, job, enter, reader)
    else:
        requested, missing, unexpected, refused = load_chunks(chunks, str(job.checkpoint), enter, reader)
    enter(COMPARE)
    rules = {rule.megatron: rule for rule in rules_of(config, dialect)}
    at = Position.here(dims.experts, not job.transformer_engine)
    enter(COMPUTE)
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
        mtp=tuple(len(chunk.mtp.layers) if has_mtp(chunk) else 0 for chunk in chunks),
        asked={key: tuple(boxes) for key, boxes in reader.asked.items()},
        renamed=tuple(sorted(reader.renamed.values())),
    )


def _load_as_trainer(
    chunks: list[Chunk], dims: ModelDims, job: RankJob, enter: Callable[[Phase], None], reader: WatchedLoad
) -> tuple[int, set[str], set[str], list[str]]:
    """As `load_chunks`, by Megatron-LM's own `load_checkpoint`, which raises for keys that the disk lacks."""
    from ckptkit.verify.witnesses.megatron.trainer import arguments_for, import_loader, load_as_trainer, pretend_gpu

    enter(IMPORT)
    import_loader()
    with pretend_gpu():
        enter(ARGUMENTS)
        args = arguments_for(dims, job)
        enter(LOAD)
        refused = load_as_trainer(chunks, args, reader)
    return len(reader.asked), set(), set(), refused


def _answers(chunks: list[Chunk], job: RankJob, vocabulary: int) -> tuple[Judged, ...]:
    """What the ranks together make of the prompts; empty on a rank without the output layer."""
    if not job.transformer_engine:
        # Where Transformer Engine is installed, routers call its `general_gemm`, whatever layers the model has
        # (`RouterGatingLinearFunction`). That rounds factors in float32 to TF32, which has 10 bits of mantissa, and it
        # knows no CPU.
        moe_utils.te_general_gemm = None
    answers: list[Judged] = []
    for prompt in job.prompts:
        found = _forward(chunks, job.sizes, prompt)
        if found is not None:
            answers.append(judged_logits(found[:, :vocabulary], prompt))
    return tuple(answers)


def _run(job: RankJob) -> None:
    report = Path(job.report)
    with PhaseLog(report) as phases:
        codec.save(witness(job, phases.enter), report)
    torch.distributed.destroy_process_group()


def _forked(job: RankJob, log: Path, parent: int) -> None:
    """One of several ranks, in a process of its own, which prints where the caller looks for what it said."""
    end_with_parent(parent)
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    _run(job)


def _fork(jobs: Sequence[RankJob], folder: Path) -> None:
    """Runs several ranks to their ends; the exit code of each stands in FOLDER/exit-RANK as soon as it is known.

    Ranks that are alone run a few at once, and no more are started after one that failed.
    """
    context = multiprocessing.get_context("fork")
    processes = {
        job.rank: context.Process(target=_forked, args=(job, folder / f"log-{job.rank}", os.getpid()), daemon=True)
        for job in jobs
    }
    at_once = jobs[0].at_once or len(jobs)
    if jobs[0].trainer:
        from ckptkit.verify.witnesses.megatron.trainer import import_loader

        import_loader()
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
    the ranks of a pipeline; virtual stage `v` of rank `p` is number `v * pp + p`.
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
            hidden = _hidden(chunks[virtual], hidden if number else None, tokens)
        torch.distributed.broadcast(hidden, ranks[rank], group=group)
    if here != sizes.pp - 1:
        return None
    chunks[-1].set_input_tensor(hidden if last else None)
    return logits(chunks[-1], tokens)[0]


def _hidden(chunk: Chunk, given: Tensor | None, tokens: Tensor) -> Tensor:
    chunk.set_input_tensor(given)
    with torch.no_grad():
        hidden: Tensor = chunk(tokens, *inputs_of(tokens))
    return hidden.contiguous()


def main() -> None:
    """Entry point of a rank, or of the process that forks several."""
    jobs = [codec.load_record(RankJob, Path(word)) for word in sys.argv[1:]]
    if len(jobs) == 1:
        _run(jobs[0])
    else:
        _fork(jobs, Path(sys.argv[1]).parent)


if __name__ == "__main__":
    main()
