"""Shapes and dtypes of an HF directory against its config.json: cut, merged, turned, rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mutations.edits import INDEX, names, replace, shard_of, tensor, write_index
from mutations.hf_config import settings
from mutations.hf_files import DEEPSEEK, EXPERT, GLM, QWEN, QWEN3
from mutations.hf_names import GATE_BIASES, GLM4, UNTIED
from mutations.mutation import Damage, Mutation


def reshaped(change: Callable[[Tensor], Tensor]) -> Damage:
    """One tensor is stored in another shape or dtype; total_size stays true."""

    def damage(path: Path, name: str) -> None:
        replace(path, {name: change(tensor(path, name))})

    return damage


def merged_with(*others: str) -> Damage:
    """The tensor holds others of its layer too, which are still there."""

    def damage(path: Path, name: str) -> None:
        module, _, leaf = name.rpartition(".")
        parent = module.rpartition(".")[0]
        replace(
            path,
            {name: torch.cat([tensor(path, name), *(tensor(path, f"{parent}.{other}.{leaf}") for other in others)])},
        )

    return damage


def fused_turned(path: Path, name: str) -> str:
    """Fused experts [experts, out, in] as [experts, in, out] in every layer."""
    replace(path, {one: tensor(path, one).transpose(1, 2) for one in names(path, ".experts.gate_up_proj")})
    return name


def rounded_biases(path: Path, folded: str) -> None:
    replace(path, {name: tensor(path, name).bfloat16() for name in names(path, "e_score_correction_bias")})


def shard_in(name: str, dtype: torch.dtype) -> Damage:
    """The shard of a tensor was converted with another dtype."""

    def damage(path: Path, folded: str) -> None:
        shard = shard_of(path, name)
        content = {key: value.to(dtype) for key, value in load_file(shard).items()}
        save_file(content, shard, metadata={"format": "pt"})
        write_index(path, json.loads((path / INDEX).read_text())["weight_map"])

    return damage


def eight_bits(path: Path, folded: str) -> None:
    """Every tensor of a kind in float8, and nothing says so."""
    replace(path, {name: tensor(path, name).to(torch.float8_e4m3fn) for name in names(path, "down_proj.weight")})


MUTATIONS = (
    # Shapes
    Mutation(
        "vocabulary cut to the tokenizer",
        "rows beyond the tokenizer's size were cut off",
        ("F23",),
        "CK105",
        reshaped(lambda t: t[:340]),
        {QWEN: "model.embed_tokens.weight", UNTIED: "lm_head.weight", GLM: "lm_head.weight"},
        ("ColossalAI#6167",),
    ),
    Mutation(
        "vocabulary still padded",
        "Megatron's padding rows were exported",
        ("F23",),
        "CK105",
        reshaped(lambda t: torch.cat([t, t[:32] * 0])),
        {QWEN: "model.embed_tokens.weight", GLM: "model.embed_tokens.weight"},
    ),
    Mutation(
        "weight turned",
        "a transpose too many or too few",
        ("F7",),
        "CK105",
        reshaped(lambda t: t.T),
        {QWEN: "model.layers.3.mlp.down_proj.weight", QWEN3: EXPERT},
        ("training-gym#100", "Megatron-Bridge#3278"),
    ),
    Mutation(
        "q, k and v in one",
        "the fused tensor was not split",
        ("F7", "F25"),
        "CK105",
        merged_with("k_proj", "v_proj"),
        {QWEN: "model.layers.3.self_attn.q_proj.weight", QWEN3: "model.layers.3.self_attn.q_proj.weight"},
    ),
    Mutation(
        "gate and up in one",
        "the fused tensor was not split",
        ("F7",),
        "CK105",
        merged_with("up_proj"),
        {GLM: "model.layers.5.mlp.experts.7.gate_proj.weight", DEEPSEEK: "model.layers.1.mlp.gate_proj.weight"},
        ("slime#1840",),
    ),
    Mutation(
        "fused experts turned",
        "experts stored [in, out] for a reader of [out, in]",
        ("F7",),
        "CK105",
        fused_turned,
        {"glm4_moe/fused": "model.layers.{2..11}.mlp.experts.gate_up_proj"},
        ("Megatron-Bridge#3278", "torchtitan#4373"),
    ),
    Mutation(
        "expert half as wide",
        "one tensor parallel rank's part of an expert",
        ("F4", "F8"),
        "CK105",
        reshaped(lambda t: t[:48]),
        {GLM: EXPERT, QWEN3: EXPERT},
        ("sglang#36438",),
    ),
    Mutation(
        "one expert fewer in a router",
        "the router of a pruned model",
        ("F8",),
        "CK105",
        reshaped(lambda t: t[:11]),
        {QWEN3: "model.layers.7.mlp.gate.weight", DEEPSEEK: "model.layers.7.mlp.gate.weight"},
    ),
    # Dtypes
    Mutation(
        "one tensor in float16",
        "one shard comes from another conversion",
        ("F9",),
        "CK107",
        reshaped(lambda t: t.half()),
        {QWEN: "model.layers.9.self_attn.o_proj.weight", GLM: EXPERT, GLM4: "model.layers.9.input_layernorm.weight"},
    ),
    Mutation(
        "one shard in float16",
        "one shard comes from another conversion",
        ("F9",),
        "CK107",
        shard_in(EXPERT, torch.float16),
        {QWEN3: "model.layers.5.mlp.experts.{0..11}.up_proj.weight"},
    ),
    Mutation(
        "router biases in bfloat16",
        "a cast of the whole model",
        ("F9",),
        "CK107",
        rounded_biases,
        {GLM: GATE_BIASES},
        ("miles#524", "Megatron-LM#1482", "sglang#31213"),
        severity="warning",
    ),
    Mutation(
        "weights in float8 silently",
        "one byte an element was taken for another format",
        ("F14",),
        "CK107",
        eight_bits,
        {QWEN: "model.layers.{0..11}.mlp.down_proj.weight"},
        ("miles#2044",),
    ),
    Mutation(
        "config.json says float32",
        "engines allocate and cast by it",
        ("F9",),
        "CK107",
        settings(dtype="float32"),
        {QWEN: "config.json", GLM: "config.json"},
        severity="warning",
    ),
)
