"""Routed experts as transformers v5 keeps them, one 3-D tensor a layer, read and written as one tensor an expert.

Fused: `mlp.experts.gate_up_proj` [experts, 2 x ffn, hidden] (gate rows above up rows) and `mlp.experts.down_proj`
[experts, hidden, ffn]. Source: transformers `Glm4MoeNaiveMoe` and `Qwen3MoeExperts`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptkit.errors import CkptkitError
from ckptkit.plan import Plan, Step, identity
from ckptkit.specs import TensorSpec

_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def is_fused(names: Iterable[str]) -> bool:
    """Whether these HF names hold fused experts."""
    return any(_FUSED.fullmatch(name) for name in names)


def unfuse(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], where: str) -> Plan:
    """From fused experts to one tensor an expert and projection; everything else passes through."""
    return Plan(tuple(_unfuse_step(spec) for spec in specs.values()), specs, where=where, config=config)


def fuse(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], where: str) -> Plan:
    """From one tensor an expert and projection to fused experts; the inverse of `unfuse`."""
    layers: dict[str, dict[tuple[int, str], TensorSpec]] = defaultdict(dict)
    steps = []
    for spec in specs.values():
        if match := _SINGLE.fullmatch(spec.name):
            layers[match[1]][int(match[2]), match[3]] = spec
        else:
            steps.append(identity(spec))
    for prefix, experts in layers.items():
        steps += [_fuse_step(prefix, experts, "gate_up_proj", ("gate", "up")), _fuse_step(prefix, experts, "down_proj", ("down",))]
    return Plan(tuple(steps), specs, where=where, config=config)


def _unfuse_step(spec: TensorSpec) -> Step:
    match = _FUSED.fullmatch(spec.name)
    if not match:
        return identity(spec)
    if len(spec.shape) != 3:
        raise CkptkitError(f"{spec}: fused experts must have three axes [experts, rows, columns]")
    experts, rows, columns = spec.shape
    kinds = ("gate", "up") if match[2] == "gate_up_proj" else ("down",)
    outputs = tuple(
        TensorSpec(f"{match[1]}.{expert}.{kind}_proj.weight", (rows // len(kinds), columns), spec.dtype) for expert in range(experts) for kind in kinds
    )

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [part for expert in tensors[0] for part in expert.chunk(len(kinds))]

    return Step((spec.name,), outputs, run, "unfuse")


def _fuse_step(prefix: str, experts: Mapping[tuple[int, str], TensorSpec], name: str, kinds: tuple[str, ...]) -> Step:
    count = 1 + max(expert for expert, _ in experts)
    inputs = [experts[expert, kind] for expert in range(count) for kind in kinds]
    rows, columns = inputs[0].shape
    output = TensorSpec(f"{prefix}.{name}", (count, rows * len(kinds), columns), inputs[0].dtype)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors)).reshape(output.shape)]

    return Step(tuple(spec.name for spec in inputs), (output,), run, "fuse")
