"""Megatron-LM's `load_checkpoint` and `save_checkpoint` on ranks of their own, over gloo, without a GPU."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.processes import TESTS, fork_ranks, run_module

from ckptkit.converters.megatron.parallel import ParallelSizes
from interop.cpu import pretend_gpu

# Megatron-LM wants the second wherever it cuts tensors.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# Strict is `raise_unexpected`: no key that the model asks for may be absent. `raise_all` would also refuse the names
# that only Transformer Engine's layers ask for, which a checkpoint for both has.
RUN = (
    "--transformer-impl local --ckpt-format torch_dist --dist-ckpt-strictness raise_unexpected "
    "--exit-on-missing-checkpoint --no-load-optim --no-load-rng --no-save-optim --no-save-rng --save-interval 1 "
    "--micro-batch-size 1 --seq-length 64 --train-iters 1 --lr 1e-4 --bf16 --tokenizer-type NullTokenizer "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion "
    "--use-cpu-initialization --distributed-backend gloo"
)


@dataclass(frozen=True)
class Training:
    """What one run of Megatron-LM loads from the root `load`, with these flags of the model, and saves into `save`.

    `config` is the HF config of the model; `source` is the HF directory to hold every parameter against.
    """

    config: dict[str, Any]
    flags: Sequence[str]
    source: str
    load: str
    save: str
    sizes: ParallelSizes


@dataclass(frozen=True)
class Loaded:
    """What one rank held after `load_checkpoint`.

    `verdicts` counts its tensors by verdict of `ckptkit.verify.witnesses.megatron.slices`; `wrong` names those not
    equal. `strict` has an entry for each call of `load_state_dict`: Megatron-LM tries again with False where True
    fails.
    """

    iteration: int
    verdicts: dict[str, int]
    wrong: list[str]
    strict: list[bool]


def run_training(training, scratch, checkout):
    """One process a rank. `checkout` is the Megatron-LM to import; without one it is the installed one.

    Raises RuntimeError with what Megatron-LM said where it refuses.
    """
    scratch.mkdir(parents=True)
    (scratch / "job.json").write_text(json.dumps(asdict(training)))
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), checkout and str(checkout)]))
    run_module("interop.megatron_training", scratch, PYTHONPATH=path, **ENVIRONMENT)
    return [Loaded(**json.loads((scratch / f"rank-{rank}.json").read_text())) for rank in range(training.sizes.world)]


# What follows runs in the process that becomes all the ranks.


def main():
    folder = Path(sys.argv[1])
    values = json.loads((folder / "job.json").read_text())
    training = Training(**{**values, "sizes": ParallelSizes(**values["sizes"])})

    from ckptkit.verify.witnesses.megatron import process  # noqa: F401

    sys.exit(not fork_ranks(training.sizes.world, partial(_rank, training, folder)))


def _rank(training, folder, rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(training.sizes.world)}
    pretend_gpu()
    args = arguments(training)
    from megatron.core import parallel_state
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    from ckptkit.converters.planner import dims_of
    from ckptkit.verify.witnesses.loading.bits import poison
    from ckptkit.verify.witnesses.megatron.model import MegatronBuild, build_chunks, connect
    from ckptkit.verify.witnesses.megatron.process import held_by

    connect(training.sizes, rank, str(folder / "store"))
    globals_of(args)
    dims = dims_of(training.config)
    chunks = build_chunks(dims, MegatronBuild(training.sizes, torch.bfloat16))
    strict = []
    for chunk in chunks:
        _record(chunk, strict)
        poison(held_by(chunk).values())
    iteration, _ = load_checkpoint(chunks, None, None, strict=True)
    loaded = _held(chunks, training, iteration, strict)
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(loaded)))
    save_checkpoint(10, chunks, None, None, 0)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def arguments(training):
    from megatron.training.arguments import parse_args, validate_args

    sizes = training.sizes
    words = [word for flag in training.flags if not flag.startswith("#") for word in shlex.split(flag)]
    words += [*RUN.split(), "--load", training.load, "--save", training.save]
    words += ["--tensor-model-parallel-size", str(sizes.tp), "--pipeline-model-parallel-size", str(sizes.pp)]
    words += ["--expert-model-parallel-size", str(sizes.ep), "--expert-tensor-parallel-size", str(sizes.etp)]
    words += ["--global-batch-size", str(sizes.world)]
    sys.argv = ["pretrain", *words]
    args = parse_args()
    validate_args(args)
    return args


def globals_of(args):
    """What Megatron-LM keeps in global variables and `load_checkpoint` reads there."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.training.global_vars import set_args

    set_args(args)
    init_num_microbatches_calculator(args.rank, None, args.global_batch_size, 1, args.data_parallel_size)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)


def _record(chunk, strict):
    load = chunk.load_state_dict

    def recorded(state, strict=True, **more):
        calls.append(strict)
        return load(state, strict=strict, **more)

    calls = strict
    chunk.load_state_dict = recorded


def _held(chunks, training, iteration, strict):
    from ckptkit.converters.planner import dims_of
    from ckptkit.verify.witnesses.megatron.process import reference_tensors, seen
    from ckptkit.verify.witnesses.megatron.slices import Position

    reference = reference_tensors(Path(training.source), None)
    at = Position.here(dims_of(training.config).experts, True)
    found = list(seen(chunks, training.config, reference, at))
    verdicts = {verdict: sum(one.verdict == verdict for one in found) for verdict in {one.verdict for one in found}}
    wrong = [f"{one.local}: {one.verdict}" for one in found if one.verdict != "equal"]
    return Loaded(iteration, verdicts, wrong, strict)


if __name__ == "__main__":
    main()
