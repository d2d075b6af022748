"""Values in the wrong place in a Megatron checkpoint, which only a source shows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mutations.edits import edit_stored, stored_tensor
from mutations.mutation import Damage
from mutations.order import QUERY, halves, of, other_training
from mutations.values import MEGATRON, MEGATRON3, MEGATRON_GLM, one_element, stored

MEGATRON_DEEPSEEK = "deepseek_v3/megatron"
FC1, FC2 = "decoder.layers.{}.mlp.linear_fc1.weight", "decoder.layers.{}.mlp.linear_fc2.weight"
EXPERTS = "decoder.layers.5.mlp.experts.experts.linear_fc1.weight"


def ungrouped(before: Tensor) -> Tensor:
    """q, k and v above one another, where Megatron has 5 queries, a key and a value for each of 2 groups."""
    groups = before.reshape(2, 7, 32, -1)
    return torch.cat([groups[:, :5].reshape(320, -1), groups[:, 5].reshape(64, -1), groups[:, 6].reshape(64, -1)])


def interleaved(before: Tensor) -> Tensor:
    """Rows of gate and up one after the other instead of one above the other."""
    return before.unflatten(-2, (2, -1)).transpose(-3, -2)


def swapped_entries(first: str, second: str) -> Damage:
    """Two stored tensors hold each other's values."""

    def damage(path: Path, named: str) -> None:
        values = {first: stored_tensor(path, second), second: stored_tensor(path, first)}
        for key, value in values.items():
            edit_stored(path, key, lambda _, value=value: value)

    return damage


MUTATIONS = (
    of(
        "stored gate and up swapped",
        "up above gate in linear_fc1",
        stored(halves(-2), named="model.layers.3.mlp.gate_proj.weight"),
        {MEGATRON: FC1.format(3)},
        ("F7",),
    ),
    of(
        "stored gate and up interleaved",
        "rows of gate and up one after the other",
        stored(interleaved, named="model.layers.3.mlp.gate_proj.weight"),
        {MEGATRON: FC1.format(3)},
        ("F7",),
    ),
    of(
        "stored expert with gate and up swapped",
        "up above gate in one expert",
        stored(halves(-2), 7, "model.layers.5.mlp.experts.7.gate_proj.weight"),
        {MEGATRON3: EXPERTS, MEGATRON_GLM: EXPERTS, MEGATRON_DEEPSEEK: EXPERTS},
        ("F7", "F8"),
    ),
    of(
        "stored q, k and v above one another",
        "not by group, as Megatron has them",
        stored(ungrouped, named=QUERY),
        {
            MEGATRON: "decoder.layers.3.self_attention.linear_qkv.weight",
            MEGATRON3: "decoder.layers.3.self_attention.linear_qkv.weight",
        },
        ("F25",),
        "gpt-neox#1315",
    ),
    of(
        "stored layers swapped",
        "two layers in each other's place",
        swapped_entries(FC2.format(2), FC2.format(10)),
        {MEGATRON: "model.layers.2.mlp.down_proj.weight"},
        ("F21",),
    ),
    of(
        "stored MTP projection's inputs swapped",
        "embedding and hidden state in the other order",
        stored(halves(1), named="model.layers.12.eh_proj.weight"),
        {MEGATRON_GLM: "mtp.layers.0.eh_proj.weight", MEGATRON_DEEPSEEK: "mtp.layers.0.eh_proj.weight"},
        ("F6",),
    ),
    of(
        "stored element changed",
        "a bit flipped, and the checksum is true",
        stored(one_element(0.25), named="model.layers.3.mlp.down_proj.weight"),
        {MEGATRON: FC2.format(3)},
        ("F2",),
    ),
    of(
        "stored weight of another training",
        "Megatron started from random weights",
        stored(other_training, named="model.layers.3.mlp.down_proj.weight"),
        {MEGATRON: FC2.format(3)},
        ("F10",),
        "slime qa.md",
    ),
    of(
        "stored router biases zero-centered",
        "biases of another step",
        stored(lambda t: t - 6.9, named="model.layers.6.mlp.gate.e_score_correction_bias"),
        {MEGATRON_GLM: "decoder.layers.6.mlp.router.expert_bias"},
        ("F9",),
    ),
)
