"""Real Megatron for tests, in processes of their own: logits of given weights, and checkpoints saved by Megatron itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Case:
    """A model for Megatron to run: its HF config, and its weights as global tensors or as a torch_dist directory."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor] | None = None
    checkpoint: Path | None = None


def logits_of(cases: Mapping[str, Case], tokens: Tensor) -> dict[str, Tensor]:
    """Logits [batch, sequence, vocabulary] that Megatron computes for each case, in one process, float32."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        torch.save({"cases": {name: vars(case) for name, case in cases.items()}, "tokens": tokens}, scratch / "in.pt")
        _run_ranks(["logits", str(scratch)], 1)
        return dict(torch.load(scratch / "out.pt"))


@dataclass(frozen=True)
class Save:
    """A checkpoint for Megatron to load from `source` and to save into `target`, as a training run would.

    `stacked` makes the model homogeneous, so that Megatron stacks all layers of a key; `singleton` asks for a key an expert.
    """

    config: Mapping[str, Any]
    source: Path
    target: Path
    stacked: bool = False
    singleton: bool = False


def save_with_megatron(saves: list[Save], tp: int) -> None:
    """Does all of them, on `tp` tensor parallel ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save([vars(save) for save in saves], Path(folder) / "in.pt")
        _run_ranks(["save", folder], tp)


def _run_ranks(arguments: list[str], world: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", __file__]
    processes = [subprocess.Popen([*command, *arguments, str(rank), str(world)], env=environment, stderr=subprocess.PIPE) for rank in range(world)]
    errors = [process.communicate(timeout=300)[1].decode() for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(errors)[-5000:])


# What follows runs in the ranks.


def _run_logits(scratch: Path) -> None:
    from converters.planner import dims_of
    from verify.megatron_layout import ParallelSizes
    from verify.megatron_model import Build, build_chunks, connect, logits
    from verify.witness_megatron import load

    content = torch.load(scratch / "in.pt", weights_only=False)
    connect(ParallelSizes(), 0, str(scratch / "store"))
    found = {}
    for name, values in content["cases"].items():
        case = Case(**values)
        dims = dims_of(case.config)
        (model,) = build_chunks(dims, Build(ParallelSizes(), torch.float32))
        if case.checkpoint:
            _, _, unexpected, refused = load([model], str(case.checkpoint))
            if unexpected or refused:
                raise RuntimeError(f"{name}: {unexpected} {refused}")
        else:
            _assign(model, case, dims.experts)
        found[name] = logits(model, content["tokens"])[..., : dims.vocab]
    torch.save(found, scratch / "out.pt")


def _assign(model: Any, case: Case, experts: int) -> None:
    from converters.planner import rules_of
    from verify.megatron_slices import global_name
    from verify.witness_megatron import held_by, layers_of

    tensors = case.tensors or {}
    rules = {rule.megatron: rule for rule in rules_of(case.config)}
    for local, held in held_by(model).items():
        whole = tensors[global_name(local, layers_of(model), range(experts), rules)]
        # The vocabulary of the model is padded, that of the tensors is not.
        held[: whole.shape[0]].copy_(whole)


def _run_saves(scratch: Path, rank: int, world: int) -> None:
    from verify.megatron_layout import ParallelSizes
    from verify.megatron_model import connect

    sizes = ParallelSizes(tp=world, etp=world)
    connect(sizes, rank, str(scratch / "store"))
    for values in torch.load(scratch / "in.pt", weights_only=False):
        _save(Save(**values), sizes, rank)


def _save(save: Save, sizes: Any, rank: int) -> None:
    from argparse import Namespace

    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.transformer.enums import AttnBackend

    from converters.arguments import megatron_args
    from converters.planner import dims_of
    from verify.megatron_model import Build, build_chunks
    from verify.witness_megatron import load

    dims = dims_of(save.config)
    (model,) = build_chunks(dims, Build(sizes, torch.bfloat16))
    load([model], str(save.source))
    if save.stacked:
        model.config.moe_layer_freq = 1
    metadata = {"singleton_local_shards": save.singleton}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    moment = torch.full((4, 6), float(rank))
    state = {
        "args": Namespace(**megatron_args(dims), params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": model.sharded_state_dict(metadata={**metadata, "dp_cp_group": group}),
        "optimizer": {"exp_avg": ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.decoder.weight", moment, (0, rank, sizes.world))},
        "rng_state": ShardedObject("rng_state", [{"random": 1}], (1, sizes.world), (0, rank)),
    }
    path = save.target / "iter_0000010"
    if rank == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(path), content_metadata=metadata)
    if rank == 0:
        (save.target / "latest_checkpointed_iteration.txt").write_text("10")


def main() -> None:
    """A rank: what to do, the folder with its input, its number, and how many there are."""
    verb, folder, rank, world = sys.argv[1:]
    if verb == "logits":
        _run_logits(Path(folder))
    else:
        _run_saves(Path(folder), int(rank), int(world))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
