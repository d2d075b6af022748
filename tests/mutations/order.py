"""Values in the wrong place in an HF directory, which only a source shows: swaps, other orders, rounding, training."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mutations.edits import names, replace, tensor
from mutations.hf_files import DEEPSEEK, EXPERT, GLM, QWEN, QWEN3
from mutations.mutation import Damage, Mutation
from mutations.values import UNTIED, one_element, valued

QUERY, KEY = "model.layers.3.self_attn.q_proj.weight", "model.layers.10.self_attn.k_proj.weight"
BIASES = "model.layers.{2..12}.mlp.gate.e_score_correction_bias"


def of(
    name: str, imitates: str, damage: Damage, on: dict[str, str], modes: tuple[str, ...], *references: str
) -> Mutation:
    return Mutation(name, imitates, modes, "CK202", damage, on, references)


def swapped(old: str, new: str) -> Damage:
    """The tensor and the one whose name has `new` for `old` hold each other's values."""

    def damage(path: Path, name: str) -> None:
        other = name.replace(old, new)
        replace(path, {name: tensor(path, other), other: tensor(path, name)})

    return damage


def next_of(pattern: str, count: int) -> Damage:
    """Every tensor that fits holds the values of the one with the next number, the pattern's first group."""

    def damage(path: Path, folded: str) -> None:
        moved = {}
        for name in names(path, ""):
            if match := re.fullmatch(pattern, name):
                moved[name] = tensor(
                    path, f"{name[: match.start(1)]}{(int(match[1]) + 1) % count}{name[match.end(1) :]}"
                )
        replace(path, moved)

    return damage


def regrouped(before: Tensor) -> Tensor:
    """Query heads as if one of each group came first: 2 groups of 5 heads of 32."""
    return before.reshape(2, 5, 32, -1).transpose(0, 1)


def half_turned(before: Tensor) -> Tensor:
    """Rotary rows of every head of 32 in pairs instead of halves, as Meta's Llama has them."""
    return before.reshape(-1, 2, 16, before.shape[-1]).transpose(1, 2)


def halves(axis: int) -> Callable[[Tensor], Tensor]:
    """The two halves along an axis in each other's place: two tensor parallel ranks joined in the wrong order."""
    return lambda before: before.roll(before.shape[axis] // 2, axis)


def other_training(before: Tensor) -> Tensor:
    """What a base model has in the place: values like these, and not these."""
    return torch.randn(before.shape, generator=torch.Generator().manual_seed(7)) * before.float().std()


def rows_up(before: Tensor) -> Tensor:
    """Every token has the row of the next."""
    return before.roll(-1, 0)


def to_bfloat16(path: Path, folded: str) -> None:
    replace(path, {name: tensor(path, name).bfloat16() for name in names(path, "e_score_correction_bias")})


def everything_in(dtype: torch.dtype) -> Damage:
    def damage(path: Path, folded: str) -> None:
        replace(path, {name: tensor(path, name).to(dtype) for name in names(path, "layers.")})

    return damage


def fused(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """One fused tensor holds other values; the place is how a finding names its experts."""

    def damage(path: Path, folded: str) -> None:
        replace(path, {name: change(tensor(path, name))})

    return damage


def as_embedding(path: Path, name: str) -> None:
    """An output layer that was tied while training."""
    replace(path, {name: tensor(path, "model.embed_tokens.weight")})


MUTATIONS = (
    of(
        "gate and up swapped",
        "two rules of one mapping in the wrong order",
        swapped("up_proj", "gate_proj"),
        {QWEN: "model.layers.3.mlp.up_proj.weight", QWEN3: EXPERT, GLM: EXPERT, DEEPSEEK: EXPERT},
        ("F7",),
        "slime#1840",
    ),
    of(
        "key and value swapped",
        "two rules of one mapping in the wrong order",
        swapped("k_proj", "v_proj"),
        {QWEN: KEY, QWEN3: KEY},
        ("F25",),
    ),
    of(
        "two experts swapped",
        "experts sorted as text: 10 before 2",
        swapped("experts.7.", "experts.10."),
        {QWEN3: EXPERT, DEEPSEEK: EXPERT},
        ("F8",),
        "verl#2612",
    ),
    of(
        "experts off by one",
        "the shared expert was counted",
        next_of(r"model\.layers\.5\.mlp\.experts\.(\d+)\.down_proj\.weight", 12),
        {GLM: "model.layers.5.mlp.experts.{0..11}.down_proj.weight"},
        ("F8",),
    ),
    of(
        "two layers swapped",
        "layers sorted as text: 10 before 2",
        swapped("layers.2.", "layers.10."),
        {QWEN: "model.layers.2.mlp.down_proj.weight", GLM: "model.layers.2.self_attn.o_proj.weight"},
        ("F21",),
    ),
    of(
        "layers off by one",
        "the embedding was counted as a layer",
        next_of(r"model\.layers\.(\d+)\..*", 12),
        {QWEN: "model.layers."},
        ("F21",),
        "Megatron-LM#1583",
        "swiss-ai/Megatron-LM#116",
    ),
    of(
        "query heads regrouped",
        "heads taken for ungrouped ones",
        valued(regrouped),
        {QWEN: QUERY, GLM: QUERY},
        ("F25",),
        "Megatron-LLM#45",
    ),
    of(
        "rotary rows in pairs",
        "rows permuted for another rotary embedding",
        valued(half_turned),
        {QWEN: QUERY, QWEN3: QUERY},
        ("F25",),
        "llama.cpp#3364",
    ),
    of(
        "gate and up interleaved",
        "rows of gate and up one after the other",
        valued(lambda t: t.reshape(2, -1, t.shape[1]).transpose(0, 1)),
        {QWEN3: EXPERT},
        ("F7",),
        "slime#2004",
    ),
    of(
        "tensor parallel halves swapped",
        "ranks joined in the wrong order",
        valued(halves(0)),
        {QWEN: "model.layers.3.mlp.up_proj.weight", DEEPSEEK: "model.layers.6.self_attn.q_b_proj.weight"},
        ("F25",),
    ),
    of(
        "tensor parallel columns swapped",
        "ranks joined in the wrong order",
        valued(halves(1)),
        {QWEN: "model.layers.3.self_attn.o_proj.weight", GLM: "model.layers.5.mlp.experts.7.down_proj.weight"},
        ("F25",),
    ),
    of(
        "MTP projection's inputs swapped",
        "embedding and hidden state in the other order",
        valued(halves(1)),
        {GLM: "model.layers.12.eh_proj.weight", DEEPSEEK: "model.layers.12.eh_proj.weight"},
        ("F6",),
    ),
    of(
        "MTP norms swapped",
        "enorm and hnorm in each other's place",
        swapped("enorm", "hnorm"),
        {GLM: "model.layers.12.enorm.weight", DEEPSEEK: "model.layers.12.enorm.weight"},
        ("F6",),
    ),
    of(
        "one element changed",
        "a bit flipped in a copy",
        valued(one_element(0.25)),
        {QWEN: "model.layers.3.mlp.up_proj.weight", DEEPSEEK: EXPERT, GLM: "model.norm.weight"},
        ("F2", "F29"),
        "sglang#18913",
    ),
    of(
        "weight of the base model",
        "a lost tensor was back-filled from the original",
        valued(other_training),
        {QWEN: "model.layers.3.mlp.up_proj.weight", GLM: EXPERT},
        ("F22",),
    ),
    of(
        "layer of the base model",
        "a rollout weight that no update reached",
        valued(other_training),
        {DEEPSEEK: "model.layers.4.self_attn.o_proj.weight"},
        ("F4", "F22"),
    ),
    of(
        "embedding off by one row",
        "a special token was counted twice",
        valued(rows_up),
        {QWEN: "model.embed_tokens.weight", UNTIED: "lm_head.weight"},
        ("F23",),
    ),
    of(
        "last rows of the vocabulary lost",
        "rows beyond the tokenizer's size were cut off and padded again",
        valued(lambda t: torch.cat([t[:300], t[300:] * 0])),
        {QWEN: "model.embed_tokens.weight", GLM: "lm_head.weight"},
        ("F23",),
    ),
    of(
        "router rows reversed",
        "experts in another order than their router",
        valued(lambda t: t.flip(0)),
        {GLM: "model.layers.4.mlp.gate.weight", QWEN3: "model.layers.4.mlp.gate.weight"},
        ("F8",),
    ),
    of(
        "fused experts with gate and up swapped",
        "up above gate",
        fused("model.layers.5.mlp.experts.gate_up_proj", halves(1)),
        {"glm4_moe/fused": "model.layers.5.mlp.experts.{0..11}.gate_proj.weight"},
        ("F7",),
        "slime#1840",
    ),
    of(
        "fused experts off by one",
        "experts by their local number",
        fused("model.layers.5.mlp.experts.down_proj", lambda t: t.roll(1, 0)),
        {"glm4_moe/fused": "model.layers.5.mlp.experts.{0..11}.down_proj.weight"},
        ("F7", "F8"),
        "Megatron-Bridge#4706",
    ),
    Mutation(
        "output layer equal to the embedding",
        "a tied export of an untied model",
        ("F19",),
        "CK202",
        as_embedding,
        {UNTIED: "lm_head.weight", GLM: "lm_head.weight"},
        ("transformers#43429",),
    ),
    Mutation(
        "router biases rounded",
        "the whole model was cast",
        ("F9",),
        "CK203",
        to_bfloat16,
        {GLM: BIASES},
        ("sglang#31213", "NeMo-Automodel#2553", "miles#524"),
        with_source=True,
        cheapest="headers",
    ),
    Mutation(
        "whole model in float16",
        "a conversion with a fixed dtype",
        ("F9",),
        "CK203",
        everything_in(torch.float16),
        {QWEN: "model.layers.{0..11}.mlp.up_proj.weight"},
        severity="warning",
        with_source=True,
        cheapest="headers",
    ),
    of(
        "latent norm of another layer",
        "two norms swapped",
        swapped("layers.4.", "layers.5."),
        {DEEPSEEK: "model.layers.4.self_attn.kv_a_layernorm.weight"},
        ("F25",),
    ),
)
