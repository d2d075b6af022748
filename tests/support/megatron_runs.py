"""Real Megatron for tests, in processes of their own: logits of given weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ckptkit.converters.planner import to_megatron
from ckptkit.formats.hf.reader import HfCheckpoint
from support.calls import call


@dataclass(frozen=True)
class Case:
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def in_megatron(path):
    """Every tensor of an HF directory as the rules map it."""
    view = to_megatron(HfCheckpoint(path), str(path))
    return {name: tensor for names in view.groups for name, tensor in view.read(names).items()}


def logits_of(cases, tokens):
    """Logits [batch, sequence, vocabulary] that Megatron computes for each case, in one process, float32."""
    return call("megatron", _logits, dict(cases), tokens)


# What follows runs in that process.


def _logits(cases, tokens):
    from ckptkit.converters.megatron.parallel import ParallelSizes
    from ckptkit.converters.planner import dims_of
    from ckptkit.verify.witnesses.megatron.model import MegatronBuild, build_chunks, connect, logits
    from support.megatron_layers import compute_layers

    with TemporaryDirectory() as folder:
        connect(ParallelSizes(), 0, f"{folder}/store")
        compute_layers()
        found = {}
        for name, case in cases.items():
            dims = dims_of(case.config)
            (model,) = build_chunks(dims, MegatronBuild(ParallelSizes(), torch.float32))
            _assign(model, case, dims.experts)
            found[name] = logits(model, tokens)[..., : dims.vocab]
        torch.distributed.destroy_process_group()
    return found


def _assign(model, case, experts):
    from ckptkit.converters.megatron.module_names import global_name
    from ckptkit.converters.planner import rules_of
    from ckptkit.verify.witnesses.megatron.process import held_by
    from ckptkit.verify.witnesses.megatron.slices import layers_of_chunk

    rules = {rule.megatron: rule for rule in rules_of(case.config)}
    for local, held in held_by(model).items():
        whole = case.tensors[global_name(local, layers_of_chunk(model), range(experts), rules)]
        # The vocabulary of the model is padded, that of the tensors is not.
        held[: whole.shape[0]].copy_(whole)
