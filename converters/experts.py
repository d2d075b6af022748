"""Converts between fused experts (one tensor per layer) and one tensor per expert.

Fused: `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`, with or without `*_proj_bias`. A family sets the layout
(`FusedExperts`); the default is transformers v5's, [experts, 2 x ffn, hidden] with gate rows above up rows and
[experts, hidden, ffn]. Source: transformers `Glm4MoeNaiveMoe`, `Qwen3MoeExperts` and `GptOssExperts`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.converters.family import FusedExperts
from ckptkit.converters.registry import family_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, Step, identity
from ckptkit.core.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = r"(.*\.(?:mlp|layers\.\d+)\.experts)"  # Gemma 4 has experts and MLP in each layer
_FUSED = re.compile(_BLOCK + r"\.(gate_up|down)_proj(_bias)?")
_UNGATED = re.compile(r".*\.mixer\.experts\.(up|down)_proj")  # Nemotron-H
_SINGLE = re.compile(_BLOCK + r"\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def is_fused(names: Iterable[str]) -> bool:
    """Whether these HF names include fused experts."""
    return any(_FUSED.fullmatch(name) or _UNGATED.fullmatch(name) for name in names)


def only_fused(config: Mapping[str, Any]) -> bool:
    """Whether no engine supports separate experts of this family."""
    return family_of(config).fused.is_required


def unfuse(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], where: str) -> Plan:
    """From fused experts to one tensor per expert and projection; other tensors pass through.

    Raises CkptkitError if fused saves of the family have different names than its release.
    """
    layout = family_of(config).fused
    if layout.renames_tensors:
        raise CkptkitError(
            f"{where} has fused experts under transformers v5's names for {config['model_type']}, which are not read",
            "save the model with save_pretrained(..., save_original_format=True), which writes the release's names",
            code="unsupported",
        )
    return Plan(tuple(_unfuse_step(spec, layout) for spec in specs.values()), specs, where=where, config=config)


def fuse(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], where: str, release: Iterable[str] = ()) -> Plan:
    """From one tensor per expert and projection to fused experts; the inverse of `unfuse`.

    `release`: the names in the release. Only the kinds of layers that are fused there are fused: Qwen3.5 fuses the
    decoder, but not the multi-token prediction layer. If `release` has no fused experts, all kinds are fused. A layer
    with one tensor per expert in `release` is never fused.
    """
    release = set(release)
    fused = {_kind(match[1]) for name in release if (match := _FUSED.fullmatch(name))}
    single = {match[1] for name in release if (match := _SINGLE.fullmatch(name))}
    layers: dict[tuple[str, str], dict[tuple[int, str], TensorSpec]] = defaultdict(dict)
    steps = []
    for spec in specs.values():
        match = _SINGLE.fullmatch(spec.name)
        if match and (_kind(match[1]) in fused or not fused) and match[1] not in single:
            layers[match[1], match[4]][int(match[2]), match[3]] = spec
        else:
            steps.append(identity(spec))
    layout = family_of(config).fused
    for (prefix, leaf), experts in layers.items():
        suffix = "_bias" if leaf == "bias" else ""
        steps += [
            _fuse_step(f"{prefix}.gate_up_proj{suffix}", experts, ("gate", "up"), layout),
            _fuse_step(f"{prefix}.down_proj{suffix}", experts, ("down",), layout),
        ]
    return Plan(tuple(steps), specs, where=where, config=config)


def _kind(prefix: str) -> str:
    return re.sub(r"\d+", "", prefix)


def _unfuse_step(spec: TensorSpec, layout: FusedExperts) -> Step:
    match = _FUSED.fullmatch(spec.name)
    if not match:
        return identity(spec)
    axes, leaf = ("experts, rows", "bias") if match[3] else ("experts, rows, columns", "weight")
    if len(spec.shape) != len(axes.split()):
        raise CkptkitError(f"{spec} has {len(spec.shape)} axes, but fused experts have {len(axes.split())} [{axes}]")
    experts, rows, *columns = (spec.shape[0], *reversed(spec.shape[1:])) if layout.transposed else spec.shape
    kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
    shape = (rows // len(kinds), *columns)
    outputs = tuple(
        TensorSpec(f"{match[1]}.{expert}.{kind}_proj.{leaf}", shape, spec.dtype)
        for expert in range(experts)
        for kind in kinds
    )

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            part
            for expert in tensors[0]
            for part in _parts(expert.T if layout.transposed and leaf == "weight" else expert, len(kinds), layout)
        ]

    return Step((spec.name,), outputs, run, "unfuse")


def _parts(expert: Tensor, count: int, layout: FusedExperts) -> Sequence[Tensor]:
    """Splits the interleaved or consecutive rows of one expert into its projections."""
    return [expert[part::count] for part in range(count)] if layout.interleaved else expert.chunk(count)


def _fuse_step(
    name: str, experts: Mapping[tuple[int, str], TensorSpec], kinds: tuple[str, ...], layout: FusedExperts
) -> Step:
    count = 1 + max(expert for expert, _ in experts)
    inputs = [experts[expert, kind] for expert in range(count) for kind in kinds]
    rows, *columns = inputs[0].shape
    shape = (rows * len(kinds), *columns)
    output = TensorSpec(name, (count, *(reversed(shape) if layout.transposed else shape)), inputs[0].dtype)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        import torch

        # [experts, projections, rows, ...], or [experts, rows, projections, ...] for interleaved rows.
        parts = torch.stack(list(tensors)).reshape(count, len(kinds), rows, *columns)
        fused = (parts.transpose(1, 2) if layout.interleaved else parts).reshape(count, *shape)
        return [fused.transpose(1, 2) if layout.transposed and columns else fused]

    return Step(tuple(spec.name for spec in inputs), (output,), run, "fuse")
