"""Optimizer state that lacks a part, is another step's, or was never trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ckptkit.formats.torch_dist.reader import read_metadata
from mutations.edits import edit_stored
from mutations.mutation import Damage, Mutation
from mutations.torch_dist import EXPERTS, lost, metadata, reshaped

Change = Callable[[Tensor], Tensor]

TRAINED = "qwen3_moe/trained"
PROJ, NORM = "decoder.layers.3.self_attention.linear_proj.weight", "decoder.final_layernorm.weight"


def _state(kind: str, weight: str) -> str:
    return f"optimizer.state.{kind}.{weight}"


def _changed(change: Change, expert: int = 0) -> Damage:
    """The stored numbers of a tensor of state are others."""

    def damage(path: Path, key: str) -> str | None:
        edit_stored(path, key, change, expert)
        return key.replace(".experts.linear", f".experts.{expert}.linear") if expert else None

    return damage


def _one(value: float) -> Change:
    """The first element is another."""

    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def _never_stepped(path: Path, kind: str) -> str:
    """Moments of every parameter are zero."""
    for key, stored in read_metadata(path / "release").tensors.items():
        if key.startswith(f"optimizer.state.{kind}."):
            for chunk in stored.chunks:
                edit_stored(path, key, torch.zeros_like, *chunk.offsets[:1])
    return f"optimizer.state.{kind}"


MUTATIONS = {
    "moment lost": Mutation("F30", "CK121", metadata(lost, PROJ), {TRAINED: _state("exp_avg", PROJ)}),
    "master weights lost": Mutation("F30", "CK121", metadata(lost, PROJ), {TRAINED: _state("param", PROJ)}),
    "moment of another shape": Mutation(
        "F30", "CK121", metadata(reshaped), {TRAINED: _state("exp_avg_sq", "output_layer.weight")}
    ),
    "moment with a NaN": Mutation("F30", "CK213", _changed(_one(float("nan"))), {TRAINED: _state("exp_avg", PROJ)}),
    "second moment that is negative": Mutation(
        "F30", "CK213", _changed(torch.neg), {TRAINED: _state("exp_avg_sq", PROJ)}
    ),
    "moments that never saw a step": Mutation("F30", "CK213", _never_stepped, {TRAINED: "exp_avg"}),
    "moment of one expert all zero": Mutation(
        "F30", "CK213", _changed(torch.zeros_like, 5), {TRAINED: _state("exp_avg", EXPERTS)}, severity="warning"
    ),
    "master weights of another step": Mutation(
        "F30", "CK214", _changed(lambda tensor: tensor * (1 + 2**-6)), {TRAINED: _state("param", PROJ)}
    ),
    "one master weight of another step": Mutation(
        "F30", "CK214", _changed(_one(7.0)), {TRAINED: _state("param", NORM)}
    ),
    "master weights of another expert": Mutation(
        "F30 F8", "CK214", _changed(lambda tensor: tensor.flip(1), 5), {TRAINED: _state("param", EXPERTS)}
    ),
}
