"""A small training job of real Megatron that calls the hooks.

Two ranks on the CPU build GPTModel chunks, wrap them as a trainer does, load, and call the hooks as slime and miles do,
first as they should be and then with a fault planted.
"""

import contextlib
import io
import json
import os
from argparse import Namespace
from functools import partial

import torch
from torch import Tensor

from support.calls import call
from support.processes import fork_ranks

LAYOUTS = {"tp": (2, 1), "ep": (2, 2)}  # tensor parallel and expert parallel size of two ranks


def run(hf, megatron, out):
    """By layout and case: what each rank said on standard error, and what it raised, "" where nothing."""
    out.mkdir()
    call("megatron", _ranks, hf, megatron, out)
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {layout: {case: [rank[layout][case] for rank in ranks] for case in ranks[0][layout]} for layout in LAYOUTS}


# What follows runs in that process.


def _ranks(hf, megatron, out):
    assert fork_ranks(2, partial(_rank, hf, megatron, out))


def _wrapped(core):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    half = Float16Module(core.config, core)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    return DistributedDataParallel(core.config, settings, half)


@contextlib.contextmanager
def _planted(*changes):
    """While this lasts, each first tensor holds the second."""
    kept = [(held, held.clone()) for held, _ in changes]
    for held, value in [(held, value.clone()) for held, value in changes]:
        held.copy_(value)
    yield
    for held, value in kept:
        held.copy_(value)


def _called(function, *arguments):
    said = io.StringIO()
    raised = ""
    with contextlib.redirect_stderr(said):
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - it is the answer
            raised = f"{type(error).__name__}: {error}"
    return {"said": said.getvalue(), "raised": raised}


def _cases(args, core, model, rank, hf):
    from ckptkit import hooks

    def again(**changes):
        return Namespace(**{**vars(args), "ckptkit_compared": [], **changes})

    yield "after_init", _called(hooks.after_init, args)
    yield "ref", _called(hooks.before_log_prob, args, model, "ref_")
    yield "actor", _called(hooks.before_log_prob, args, model, "")
    yield "actor again", _called(hooks.before_log_prob, args, model, "")
    yield "step", _called(hooks.before_train_step, args, 0, 0, model, None, None)
    yield "after a step", _called(hooks.before_log_prob, args, model, "teacher_")
    yield "of HF", _called(hooks.before_log_prob, again(load=str(hf)), model, "")
    yield "nothing named", _called(hooks.before_log_prob, again(load=None, ref_load=None), model, "")
    yield "absent", _called(hooks.before_log_prob, again(load="/absent"), model, "")
    os.environ["CKPTKIT_COMPARED_PARAMETERS"] = "all"
    yield "all", _called(hooks.before_log_prob, again(), model, "")
    with torch.no_grad():
        held = {name: tensor for name, tensor in core.state_dict().items() if isinstance(tensor, Tensor)}
        first, second = (held[f"decoder.layers.4.mlp.experts.local_experts.{n}.linear_fc1.weight"] for n in (1, 2))
        with _planted((first, second), (second, first)) if rank else contextlib.nullcontext():
            yield "experts exchanged on rank 1", _called(hooks.before_log_prob, again(), model, "")
        norms = [held[f"decoder.layers.{layer}.pre_mlp_layernorm.weight"] for layer in (4, 5)]
        with _planted((norms[0], norms[1] + 0.5)):
            yield "another norm", _called(hooks.before_log_prob, again(), model, "")
        routers = [held[f"decoder.layers.{layer}.mlp.router.weight"] for layer in (4, 5)]
        with _planted((routers[0], routers[1])):
            yield "router of another layer", _called(hooks.before_log_prob, again(), model, "")
        with _planted((routers[0], torch.zeros_like(routers[0]))):
            yield "router zero", _called(hooks.before_log_prob, again(), model, "")
            yield "router zero at a step", _called(hooks.before_train_step, again(), 3, 1, model, None, None)
        bias = held["decoder.layers.6.mlp.router.expert_bias"]
        with _planted((bias, bias.roll(1))):
            yield "router bias", _called(hooks.before_log_prob, again(), model, "")
        qkv = held["decoder.layers.7.self_attention.linear_qkv.weight"]
        with _planted((qkv, qkv.roll(1, 0))) if rank else contextlib.nullcontext():
            yield "rows on rank 1", _called(hooks.before_log_prob, again(), model, "")
    del os.environ["CKPTKIT_COMPARED_PARAMETERS"]


def _rank(hf, megatron, out, rank):
    from megatron.core import parallel_state

    from ckptkit.converters.megatron.arguments import megatron_args
    from ckptkit.converters.megatron.parallel import ParallelSizes
    from ckptkit.converters.planner import dims_of
    from ckptkit.formats.hf.reader import HfCheckpoint
    from ckptkit.verify.witnesses.megatron.model import MegatronBuild, build_chunks, connect, lay_out
    from ckptkit.verify.witnesses.megatron.process import load_chunks

    dims = dims_of(HfCheckpoint(hf).config)
    found = {}
    for layout, (tp, ep) in LAYOUTS.items():
        sizes = ParallelSizes(tp, 1, ep, 1 if ep > 1 else tp)
        if not torch.distributed.is_initialized():
            connect(sizes, rank, str(out / "store"))
        else:
            parallel_state.destroy_model_parallel()
            lay_out(sizes)
        (core,) = build_chunks(dims, MegatronBuild(sizes, torch.bfloat16))
        wrapped = _wrapped(core)
        load_chunks([core], str(megatron / "release"))
        args = Namespace(**megatron_args(dims), hf_checkpoint=str(hf), load=str(megatron), ref_load=str(megatron))
        found[layout] = dict(_cases(args, core, [wrapped], rank, hf))
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
