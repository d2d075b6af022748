"""Values that are wrong by themselves, with no source needed: zeros, constants, no numbers, outliers, copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mutations.edits import edit_stored, names, replace, stored_tensor, tensor
from mutations.hf_files import DEEPSEEK, EXPERT, GLM, QWEN, QWEN3
from mutations.mutation import Damage, Mutation

UNTIED, GLM4 = "qwen2-untied/hf", "glm4_moe/int4"
MEGATRON, MEGATRON3, MEGATRON_GLM = "qwen2/megatron", "qwen3_moe/megatron", "glm4_moe/megatron"


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

    def damage(path: Path, folded: str) -> None:
        replace(path, {name: tensor(path, origin)})

    return damage


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


ROUTER = "model.layers.4.mlp.gate.weight"
NORM_4 = "model.layers.4.post_attention_layernorm.weight"

MUTATIONS = (
    Mutation(
        "router all zero",
        "the reader did not know a packed router's name and kept zeros",
        ("F3",),
        "CK205",
        valued(torch.zeros_like),
        {GLM: ROUTER, QWEN3: ROUTER, DEEPSEEK: ROUTER, GLM4: ROUTER},
        ("slime debug.md",),
    ),
    Mutation(
        "stored router all zero",
        "a parameter that was never loaded was saved",
        ("F3", "F4"),
        "CK205",
        stored(torch.zeros_like),
        {MEGATRON_GLM: "decoder.layers.4.mlp.router.weight", MEGATRON3: "decoder.layers.4.mlp.router.weight"},
    ),
    Mutation(
        "embedding all zero",
        "a parameter that was never loaded was saved",
        ("F4",),
        "CK205",
        valued(torch.zeros_like),
        {QWEN: "model.embed_tokens.weight", GLM: "lm_head.weight"},
    ),
    Mutation(
        "expert constant",
        "an initial value that nothing overwrote",
        ("F4", "F7"),
        "CK205",
        valued(lambda t: torch.full_like(t, 0.02)),
        {GLM: EXPERT, QWEN3: EXPERT},
        ("Megatron-Bridge#4706",),
    ),
    Mutation(
        "norm all zero",
        "a norm that is stored as its distance from one",
        ("F4",),
        "CK205",
        valued(torch.zeros_like),
        {GLM: NORM_4, QWEN: NORM_4},
    ),
    Mutation(
        "stored norm all zero",
        "a norm that is stored as its distance from one",
        ("F4",),
        "CK205",
        stored(torch.zeros_like),
        {MEGATRON: "decoder.layers.4.mlp.linear_fc1.layer_norm_weight"},
    ),
    Mutation(
        "half of an expert never loaded",
        "all names are there, and half of each expert was filled",
        ("F4",),
        "CK205",
        valued(half_rows),
        {GLM: EXPERT, QWEN: "model.layers.3.mlp.up_proj.weight"},
        ("sglang#36438",),
        severity="warning",
    ),
    Mutation(
        "half of a stored expert never loaded",
        "one tensor parallel rank's part is missing",
        ("F4",),
        "CK205",
        stored(lambda t: torch.cat([t[:, :96], t[:, 96:] * 0], 1), 7, "experts.7.linear_fc1"),
        {MEGATRON_GLM: "decoder.layers.5.mlp.experts.experts.linear_fc1.weight"},
        ("sglang#36438",),
        severity="warning",
    ),
    Mutation(
        "not a number",
        "training diverged, or a cast overflowed",
        ("F2",),
        "CK204",
        valued(one_element(math.nan)),
        {
            QWEN: "model.layers.6.self_attn.v_proj.weight",
            DEEPSEEK: "model.layers.6.self_attn.kv_b_proj.weight",
            GLM4: "model.norm.weight",
        },
    ),
    Mutation(
        "infinite",
        "a cast to float16 overflowed",
        ("F2",),
        "CK204",
        valued(one_element(math.inf)),
        {QWEN3: "model.layers.6.self_attn.v_proj.weight", GLM: "model.layers.12.eh_proj.weight"},
    ),
    Mutation(
        "stored not a number",
        "training diverged",
        ("F2",),
        "CK204",
        stored(one_element(math.nan)),
        {
            MEGATRON: "decoder.layers.6.self_attention.linear_qkv.weight",
            MEGATRON_GLM: "decoder.layers.6.mlp.router.expert_bias",
        },
    ),
    Mutation(
        "nothing but denormals",
        "bytes of another format",
        ("F13", "F14"),
        "CK207",
        valued(denormal),
        {QWEN: "model.layers.3.mlp.up_proj.weight", GLM: EXPERT},
    ),
    Mutation(
        "weight 200 times too large",
        "a scale was applied twice, or not at all",
        ("F13",),
        "CK208",
        valued(lambda t: t * 200),
        {QWEN: "model.layers.3.mlp.up_proj.weight", GLM: EXPERT, DEEPSEEK: "model.layers.6.self_attn.kv_b_proj.weight"},
    ),
    Mutation(
        "weight 200 times too small",
        "a scale was applied twice, or not at all",
        ("F13",),
        "CK208",
        valued(lambda t: t / 200),
        {QWEN3: EXPERT, QWEN: "model.layers.3.self_attn.o_proj.weight"},
    ),
    Mutation(
        "memory that was never written",
        "a missing layer keeps what was in memory",
        ("F2", "F4"),
        "CK208",
        valued(garbage),
        {QWEN: "model.layers.3.mlp.up_proj.weight", GLM: EXPERT},
        ("sglang#16235", "sglang#33245"),
    ),
    Mutation(
        "stored weight 200 times too large",
        "a scale was applied twice",
        ("F13",),
        "CK208",
        stored(lambda t: t * 200),
        {MEGATRON: "decoder.layers.3.mlp.linear_fc2.weight"},
    ),
    Mutation(
        "expert copied over another",
        "a fused expert was indexed by its local number",
        ("F8",),
        "CK206",
        copied(EXPERT, "model.layers.5.mlp.experts.1.up_proj.weight"),
        dict.fromkeys((GLM, QWEN3, DEEPSEEK), "model.layers.5.mlp.experts.{1,7}.up_proj.weight"),
        ("slime#1799",),
    ),
    Mutation(
        "experts of rank 1 are those of rank 0",
        "experts by their local number under expert parallelism",
        ("F8",),
        "CK206",
        local_experts,
        {QWEN3: "model.layers."},
        ("slime#1799", "verl#2612"),
    ),
    Mutation(
        "layer copied over its neighbour",
        "an adjacent layer was read twice",
        ("F21",),
        "CK206",
        copied("model.layers.9.self_attn.o_proj.weight", "model.layers.8.self_attn.o_proj.weight"),
        dict.fromkeys((QWEN, GLM), "model.layers.{8..9}.self_attn.o_proj.weight"),
    ),
    Mutation(
        "layers of stage 1 are those of stage 0",
        "layers by their local number under pipeline parallelism",
        ("F21",),
        "CK206",
        local_layers,
        {QWEN: "model.layers."},
        ("Megatron-LM#1583", "transformers#24381"),
    ),
    Mutation(
        "stored layers of stage 1 are those of stage 0",
        "layers by their local number under virtual pipeline stages",
        ("F21",),
        "CK206",
        local_stored_layers,
        {MEGATRON: "decoder.layers."},
        ("Megatron-LM#1583", "Megatron-LM#116"),
    ),
    Mutation(
        "fp32 state that was once bfloat16",
        "a buffer was cast to bfloat16 and back",
        ("F9",),
        "CK210",
        rounded_state,
        {GLM: "model.layers.{2..12}.mlp.gate.e_score_correction_bias"},
        ("Megatron-LM#1482", "transformers#42580"),
        severity="warning",
    ),
)
