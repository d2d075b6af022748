"""Values that are wrong by themselves, or in the wrong place, which only a source or a manifest shows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mutations.edits import edit_stored, names, replace, stored_tensor, tensor
from mutations.hf_files import DEEPSEEK, EXPERT, GLM, GLM4, QWEN, QWEN3, UNTIED, WEIGHT
from mutations.hf_names import all_in
from mutations.mutation import EH_PROJ, EMBEDDINGS, HEAD, UP, Damage, Mutation, at

MEGATRON, MEGATRON3, MEGATRON_GLM = "qwen2/megatron", "qwen3_moe/megatron", "glm4_moe/megatron"
MEGATRON_DEEPSEEK = "deepseek_v3/megatron"
ROUTER, NORM_4 = "model.layers.4.mlp.gate.weight", "model.layers.4.post_attention_layernorm.weight"
QUERY, KEY = "model.layers.3.self_attn.q_proj.weight", "model.layers.10.self_attn.k_proj.weight"
BIASES = "model.layers.{2..12}.mlp.gate.e_score_correction_bias"
FC1, FC2 = "decoder.layers.{}.mlp.linear_fc1.weight", "decoder.layers.{}.mlp.linear_fc2.weight"
EXPERTS = "decoder.layers.5.mlp.experts.experts.linear_fc1.weight"


def valued(change: Callable[[Tensor], Tensor]) -> Damage:
    """One tensor holds other values, in the same shape and dtype."""

    def damage(path: Path, name: str) -> None:
        before = tensor(path, name)
        replace(path, {name: change(before).to(before.dtype).reshape(before.shape)})

    return damage


def stored(change: Callable[[Tensor], Tensor], expert: int = 0, named: str | None = None) -> Damage:
    """A tensor of a Megatron checkpoint, or one expert of it, holds other values; `named` is how a finding calls it."""

    def damage(path: Path, key: str) -> str | None:
        edit_stored(path, key, lambda before: change(before).to(before.dtype).reshape(before.shape), expert)
        return named

    return damage


def one_element(value: float) -> Callable[[Tensor], Tensor]:
    """The last element is another."""

    def change(before: Tensor) -> Tensor:
        after = before.clone()
        after.view(-1)[-1] = value
        return after

    return change


def half_rows(before: Tensor) -> Tensor:
    """Only the first half of the rows was ever loaded."""
    after = before.clone()
    after[len(before) // 2 :] = 0
    return after


def denormal(before: Tensor) -> Tensor:
    """What bytes of another format look like: numbers, and all of them far below what a weight can be."""
    return torch.full_like(before, 1e-39) * torch.sign(before)


def garbage(before: Tensor) -> Tensor:
    """What memory that was never written may hold: finite numbers of every magnitude."""
    generator = torch.Generator().manual_seed(5)
    return torch.exp(torch.rand(before.shape, generator=generator) * 60 - 40) * torch.sign(before.float())


def copied(name: str, origin: str) -> Damage:
    """A tensor holds the bytes of another; the place is how a finding names both."""
    return lambda path, folded: replace(path, {name: tensor(path, origin)})


def local_experts(path: Path, folded: str) -> None:
    """The second of two expert parallel ranks wrote the experts that have its local numbers: 6 to 11 are 0 to 5."""
    moved = {}
    for name in names(path, ".experts."):
        before, _, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        if int(number) >= 6:
            moved[name] = tensor(path, f"{before}.experts.{int(number) - 6}.{rest}")
    replace(path, moved)


def local_layers(path: Path, folded: str) -> None:
    """The second of two pipeline stages wrote its layers by their local numbers: 6 to 11 are 0 to 5."""
    found = {
        name: f"model.layers.{int(name.split('.')[2]) - 6}." + name.split(".", 3)[3]
        for name in names(path, "model.layers.")
        if int(name.split(".")[2]) >= 6
    }
    replace(path, {name: tensor(path, origin) for name, origin in found.items()})


def local_stored_layers(path: Path, folded: str) -> None:
    """The same in a Megatron checkpoint."""
    kinds = (
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    )
    for kind in kinds:
        for layer in range(6, 12):
            origin = stored_tensor(path, f"decoder.layers.{layer - 6}.{kind}")
            edit_stored(path, f"decoder.layers.{layer}.{kind}", lambda _, origin=origin: origin)


def rounded_state(path: Path, folded: str) -> None:
    """fp32 state that went through bfloat16 and came back: the dtype is right again, the values are not."""
    replace(path, {name: tensor(path, name).bfloat16().float() for name in names(path, "e_score_correction_bias")})


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


def fused(part: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """One fused tensor holds other values; the place is how a finding names its experts."""
    name = f"model.layers.5.mlp.experts.{part}"
    return lambda path, folded: replace(path, {name: change(tensor(path, name))})


def as_embedding(path: Path, name: str) -> None:
    """An output layer that was tied while training."""
    replace(path, {name: tensor(path, "model.embed_tokens.weight")})


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
        values = [stored_tensor(path, key) for key in (second, first)]
        edit_stored(path, first, lambda _: values[0])
        edit_stored(path, second, lambda _: values[1])

    return damage


def append_newline(path: Path, file: str) -> None:
    (path / file).write_text((path / file).read_text() + "\n")


MUTATIONS = {
    "router all zero": Mutation("F3", "CK205", valued(torch.zeros_like), at(ROUTER, GLM, QWEN3, DEEPSEEK, GLM4)),
    "stored router all zero": Mutation(
        "F3 F4", "CK205", stored(torch.zeros_like), at("decoder.layers.4.mlp.router.weight", MEGATRON_GLM, MEGATRON3)
    ),
    "embedding all zero": Mutation("F4", "CK205", valued(torch.zeros_like), {QWEN: EMBEDDINGS, GLM: HEAD}),
    "expert constant": Mutation("F4 F7", "CK205", valued(lambda t: torch.full_like(t, 0.02)), at(EXPERT, GLM, QWEN3)),
    "norm all zero": Mutation("F4", "CK205", valued(torch.zeros_like), at(NORM_4, GLM, QWEN)),
    "stored norm all zero": Mutation(
        "F4", "CK205", stored(torch.zeros_like), {MEGATRON: "decoder.layers.4.mlp.linear_fc1.layer_norm_weight"}
    ),
    "half of an expert never loaded": Mutation(
        "F4", "CK205", valued(half_rows), {GLM: EXPERT, QWEN: UP}, severity="warning"
    ),
    "half of a stored expert never loaded": Mutation(
        "F4",
        "CK205",
        stored(lambda t: torch.cat([t[:, :96], t[:, 96:] * 0], 1), 7, "experts.7.linear_fc1"),
        {MEGATRON_GLM: "decoder.layers.5.mlp.experts.experts.linear_fc1.weight"},
        severity="warning",
    ),
    "not a number": Mutation(
        "F2",
        "CK204",
        valued(one_element(math.nan)),
        {
            QWEN: "model.layers.6.self_attn.v_proj.weight",
            DEEPSEEK: "model.layers.6.self_attn.kv_b_proj.weight",
            GLM4: "model.norm.weight",
        },
    ),
    "infinite": Mutation(
        "F2", "CK204", valued(one_element(math.inf)), {QWEN3: "model.layers.6.self_attn.v_proj.weight", GLM: EH_PROJ}
    ),
    "stored not a number": Mutation(
        "F2",
        "CK204",
        stored(one_element(math.nan)),
        {
            MEGATRON: "decoder.layers.6.self_attention.linear_qkv.weight",
            MEGATRON_GLM: "decoder.layers.6.mlp.router.expert_bias",
        },
    ),
    "nothing but denormals": Mutation("F13 F14", "CK207", valued(denormal), WEIGHT),
    "weight 200 times too large": Mutation(
        "F13",
        "CK208",
        valued(lambda t: t * 200),
        {QWEN: UP, GLM: EXPERT, DEEPSEEK: "model.layers.6.self_attn.kv_b_proj.weight"},
    ),
    "weight 200 times too small": Mutation(
        "F13", "CK208", valued(lambda t: t / 200), {QWEN3: EXPERT, QWEN: "model.layers.3.self_attn.o_proj.weight"}
    ),
    "memory that was never written": Mutation("F2 F4", "CK208", valued(garbage), WEIGHT),
    "stored weight 200 times too large": Mutation(
        "F13", "CK208", stored(lambda t: t * 200), {MEGATRON: "decoder.layers.3.mlp.linear_fc2.weight"}
    ),
    "expert copied over another": Mutation(
        "F8",
        "CK206",
        copied(EXPERT, "model.layers.5.mlp.experts.1.up_proj.weight"),
        at("model.layers.5.mlp.experts.{1,7}.up_proj.weight", GLM, QWEN3, DEEPSEEK),
    ),
    "experts of rank 1 are those of rank 0": Mutation("F8", "CK206", local_experts, {QWEN3: "model.layers."}),
    "layer copied over its neighbour": Mutation(
        "F21",
        "CK206",
        copied("model.layers.9.self_attn.o_proj.weight", "model.layers.8.self_attn.o_proj.weight"),
        at("model.layers.{8..9}.self_attn.o_proj.weight", QWEN, GLM),
    ),
    "layers of stage 1 are those of stage 0": Mutation("F21", "CK206", local_layers, {QWEN: "model.layers."}),
    "stored layers of stage 1 are those of stage 0": Mutation(
        "F21", "CK206", local_stored_layers, {MEGATRON: "decoder.layers."}
    ),
    "fp32 state that was once bfloat16": Mutation(
        "F9", "CK210", rounded_state, {GLM: "model.layers.{2..12}.mlp.gate.e_score_correction_bias"}, severity="warning"
    ),
    "gate and up swapped": Mutation(
        "F7", "CK202", swapped("up_proj", "gate_proj"), {QWEN: UP, QWEN3: EXPERT, GLM: EXPERT, DEEPSEEK: EXPERT}
    ),
    "key and value swapped": Mutation("F25", "CK202", swapped("k_proj", "v_proj"), at(KEY, QWEN, QWEN3)),
    "two experts swapped": Mutation("F8", "CK202", swapped("experts.7.", "experts.10."), at(EXPERT, QWEN3, DEEPSEEK)),
    "experts off by one": Mutation(
        "F8",
        "CK202",
        next_of(r"model\.layers\.5\.mlp\.experts\.(\d+)\.down_proj\.weight", 12),
        {GLM: "model.layers.5.mlp.experts.{0..11}.down_proj.weight"},
    ),
    "two layers swapped": Mutation(
        "F21",
        "CK202",
        swapped("layers.2.", "layers.10."),
        {QWEN: "model.layers.2.mlp.down_proj.weight", GLM: "model.layers.2.self_attn.o_proj.weight"},
    ),
    "layers off by one": Mutation("F21", "CK202", next_of(r"model\.layers\.(\d+)\..*", 12), {QWEN: "model.layers."}),
    "query heads regrouped": Mutation("F25", "CK202", valued(regrouped), at(QUERY, QWEN, GLM)),
    "rotary rows in pairs": Mutation("F25", "CK202", valued(half_turned), at(QUERY, QWEN, QWEN3)),
    "gate and up interleaved": Mutation(
        "F7", "CK202", valued(lambda t: t.reshape(2, -1, t.shape[1]).transpose(0, 1)), {QWEN3: EXPERT}
    ),
    "tensor parallel halves swapped": Mutation(
        "F25", "CK202", valued(halves(0)), {QWEN: UP, DEEPSEEK: "model.layers.6.self_attn.q_b_proj.weight"}
    ),
    "tensor parallel columns swapped": Mutation(
        "F25",
        "CK202",
        valued(halves(1)),
        {QWEN: "model.layers.3.self_attn.o_proj.weight", GLM: "model.layers.5.mlp.experts.7.down_proj.weight"},
    ),
    "MTP projection's inputs swapped": Mutation("F6", "CK202", valued(halves(1)), at(EH_PROJ, GLM, DEEPSEEK)),
    "MTP norms swapped": Mutation(
        "F6", "CK202", swapped("enorm", "hnorm"), at("model.layers.12.enorm.weight", GLM, DEEPSEEK)
    ),
    "one element changed": Mutation(
        "F2 F29", "CK202", valued(one_element(0.25)), {QWEN: UP, DEEPSEEK: EXPERT, GLM: "model.norm.weight"}
    ),
    "weight of the base model": Mutation("F22", "CK202", valued(other_training), WEIGHT),
    "layer of the base model": Mutation(
        "F4 F22", "CK202", valued(other_training), {DEEPSEEK: "model.layers.4.self_attn.o_proj.weight"}
    ),
    "embedding off by one row": Mutation("F23", "CK202", valued(rows_up), {QWEN: EMBEDDINGS, UNTIED: HEAD}),
    "last rows of the vocabulary lost": Mutation(
        "F23", "CK202", valued(lambda t: torch.cat([t[:300], t[300:] * 0])), {QWEN: EMBEDDINGS, GLM: HEAD}
    ),
    "router rows reversed": Mutation(
        "F8", "CK202", valued(lambda t: t.flip(0)), at("model.layers.4.mlp.gate.weight", GLM, QWEN3)
    ),
    "fused experts with gate and up swapped": Mutation(
        "F7",
        "CK202",
        fused("gate_up_proj", halves(1)),
        {"glm4_moe/fused": "model.layers.5.mlp.experts.{0..11}.gate_proj.weight"},
    ),
    "fused experts off by one": Mutation(
        "F7 F8",
        "CK202",
        fused("down_proj", lambda t: t.roll(1, 0)),
        {"glm4_moe/fused": "model.layers.5.mlp.experts.{0..11}.down_proj.weight"},
    ),
    "output layer equal to the embedding": Mutation("F19", "CK202", as_embedding, at(HEAD, UNTIED, GLM)),
    "router biases rounded": Mutation(
        "F9",
        "CK203",
        all_in(torch.bfloat16, "e_score_correction_bias"),
        {GLM: BIASES},
        with_source=True,
        cheapest="headers",
    ),
    "whole model in float16": Mutation(
        "F9",
        "CK203",
        all_in(torch.float16, "layers."),
        {QWEN: "model.layers.{0..11}.mlp.up_proj.weight"},
        severity="warning",
        with_source=True,
        cheapest="headers",
    ),
    "latent norm of another layer": Mutation(
        "F25", "CK202", swapped("layers.4.", "layers.5."), {DEEPSEEK: "model.layers.4.self_attn.kv_a_layernorm.weight"}
    ),
    "stored gate and up swapped": Mutation(
        "F7", "CK202", stored(halves(-2), named="model.layers.3.mlp.gate_proj.weight"), {MEGATRON: FC1.format(3)}
    ),
    "stored gate and up interleaved": Mutation(
        "F7", "CK202", stored(interleaved, named="model.layers.3.mlp.gate_proj.weight"), {MEGATRON: FC1.format(3)}
    ),
    "stored expert with gate and up swapped": Mutation(
        "F7 F8",
        "CK202",
        stored(halves(-2), 7, "model.layers.5.mlp.experts.7.gate_proj.weight"),
        at(EXPERTS, MEGATRON3, MEGATRON_GLM, MEGATRON_DEEPSEEK),
    ),
    "stored q, k and v above one another": Mutation(
        "F25",
        "CK202",
        stored(ungrouped, named=QUERY),
        at("decoder.layers.3.self_attention.linear_qkv.weight", MEGATRON, MEGATRON3),
    ),
    "stored layers swapped": Mutation(
        "F21",
        "CK202",
        swapped_entries(FC2.format(2), FC2.format(10)),
        {MEGATRON: "model.layers.2.mlp.down_proj.weight"},
    ),
    "stored MTP projection's inputs swapped": Mutation(
        "F6",
        "CK202",
        stored(halves(1), named="model.layers.12.eh_proj.weight"),
        at("mtp.layers.0.eh_proj.weight", MEGATRON_GLM, MEGATRON_DEEPSEEK),
    ),
    "stored element changed": Mutation(
        "F2", "CK202", stored(one_element(0.25), named="model.layers.3.mlp.down_proj.weight"), {MEGATRON: FC2.format(3)}
    ),
    "stored weight of another training": Mutation(
        "F10", "CK202", stored(other_training, named="model.layers.3.mlp.down_proj.weight"), {MEGATRON: FC2.format(3)}
    ),
    "stored router biases zero-centered": Mutation(
        "F9",
        "CK202",
        stored(lambda t: t - 6.9, named="model.layers.6.mlp.gate.e_score_correction_bias"),
        {MEGATRON_GLM: "decoder.layers.6.mlp.router.expert_bias"},
    ),
    "another conversion of the release": Mutation(
        "F29 F22", "CK120", valued(one_element(0.25)), {QWEN: UP, "glm4_moe/int4": EH_PROJ}, with_manifest=True
    ),
    "words of another conversion": Mutation(
        "F29",
        "CK120",
        valued(lambda t: t.flip(0)),
        {"glm4_moe/int4": "model.layers.5.mlp.experts.11.down_proj.weight_packed"},
        with_manifest=True,
    ),
    "tokenizer changed after the manifest": Mutation(
        "F24 F29",
        "CK120",
        append_newline,
        {QWEN: "tokenizer.json", DEEPSEEK: "chat_template.jinja"},
        with_manifest=True,
    ),
}
