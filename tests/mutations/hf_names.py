"""Names of an HF directory against its config.json: tensors that are lost, garbled or invented."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mutations.edits import INDEX, names, rename, replace, tensor
from mutations.hf_files import DEEPSEEK, GLM, QWEN, QWEN3, WEIGHT
from mutations.mutation import Damage, Mutation

UNTIED, GLM4 = "qwen2-untied/hf", "glm4_moe/int4"
GATE_BIASES = "model.layers.{2..12}.mlp.gate.e_score_correction_bias"


def lost(path: Path, name: str) -> None:
    """One tensor is in no shard, and the index does not list it."""
    replace(path, {}, [name])


def lost_all(part: str) -> Damage:
    """Every tensor with this part in its name is lost; the place is how a finding folds them."""

    def damage(path: Path, folded: str) -> None:
        replace(path, {}, names(path, part))

    return damage


def never_exported(part: str) -> Damage:
    """Another export, into one file, without the tensors with this part in their names, as a finding folds them."""

    def damage(path: Path, folded: str) -> None:
        kept = {name: tensor(path, name) for name in names(path, "") if part not in name}
        for file in [*path.glob("*.safetensors"), path / INDEX]:
            file.unlink()
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})

    return damage


def renamed(old: str, new: str) -> Damage:
    """Every name that the pattern fits is written another way."""

    def damage(path: Path, name: str) -> None:
        rename(path, lambda one: re.sub(old, new, one))

    return damage


def added(new: Callable[[Path], dict[str, Tensor]]) -> Damage:
    """Tensors that no config promises."""

    def damage(path: Path, name: str) -> None:
        replace(path, new(path))

    return damage


def lora(path: Path) -> dict[str, Tensor]:
    return {f"model.layers.3.self_attn.q_proj.lora_{part}.weight": torch.randn(8, 128).bfloat16() for part in "AB"}


def adapter_files(path: Path, file: str) -> None:
    (path / file).write_text('{"peft_type": "LORA", "r": 8}')


MUTATIONS = (
    # Lost
    Mutation(
        "tensor lost everywhere",
        "a mapping had no rule for it, the index follows",
        ("F1", "F4"),
        "CK104",
        lost,
        WEIGHT,
        ("Megatron-Bridge#1883",),
    ),
    Mutation(
        "router lost",
        "one router of ten was not exported",
        ("F1",),
        "CK104",
        lost,
        {QWEN3: "model.layers.4.mlp.gate.weight", DEEPSEEK: "model.layers.4.mlp.gate.weight"},
    ),
    Mutation(
        "router biases lost",
        "a buffer is not a parameter, so the export forgot it",
        ("F9",),
        "CK104",
        lost_all("e_score_correction_bias"),
        {GLM: GATE_BIASES},
    ),
    Mutation(
        "attention biases lost",
        "no flag said that the model has any",
        ("F5", "F27"),
        "CK104",
        lost_all("k_proj.bias"),
        {QWEN: "model.layers.{0..11}.self_attn.k_proj.bias"},
    ),
    Mutation(
        "query and key norms lost",
        "an architecture option was off",
        ("F5", "F27"),
        "CK104",
        lost_all("self_attn.q_norm"),
        {QWEN3: "model.layers.{0..11}.self_attn.q_norm.weight"},
    ),
    Mutation(
        "output layer lost",
        "the export took the model for a tied one",
        ("F19",),
        "CK104",
        lost,
        dict.fromkeys((UNTIED, QWEN3, GLM4), "lm_head.weight"),
        ("Megatron-Bridge#4883",),
    ),
    Mutation(
        "MTP layer lost",
        "the layer behind the last was never exported",
        ("F6",),
        "CK202",
        never_exported("model.layers.12."),
        {GLM: "model.layers.12.eh_proj.weight", DEEPSEEK: "model.layers.12.eh_proj.weight"},
        ("Megatron-Bridge#4960", "ms-swift#6644"),
    ),
    Mutation(
        "MTP projection lost",
        "a conversion that is defined and never called",
        ("F6",),
        "CK104",
        lost,
        {GLM: "model.layers.12.eh_proj.weight", DEEPSEEK: "model.layers.12.enorm.weight"},
        ("mcore-bridge#93",),
    ),
    Mutation(
        "expert lost in one layer",
        "one expert of one rank",
        ("F1", "F8"),
        "CK104",
        lost_all("layers.9.mlp.experts.11."),
        {QWEN3: "model.layers.9.mlp.experts.11.down_proj.weight"},
    ),
    # Garbled
    Mutation(
        "experts under garbled names",
        "the expert's number was put behind the weight",
        ("F8",),
        "CK104",
        renamed(r"experts\.(\d+)\.(\w+)\.weight", r"experts.\2.weight\1"),
        {QWEN3: "model.layers.{0..11}.mlp.experts.gate_proj.weight11"},
        ("verl#2319", "verl#2024"),
    ),
    Mutation(
        "experts numbered from one",
        "off by one in a name",
        ("F8",),
        "CK104",
        renamed(r"experts\.11\.", "experts.12."),
        {
            QWEN3: "model.layers.{0..11}.mlp.experts.12.up_proj.weight",
            GLM: "model.layers.{2..11}.mlp.experts.12.up_proj.weight",
        },
    ),
    Mutation(
        "layers numbered from one",
        "off by one in a name",
        ("F21",),
        "CK104",
        renamed(r"layers\.0\.", "layers.99."),
        {QWEN: "model.layers.99.mlp.up_proj.weight"},
    ),
    Mutation(
        "names with a wrapper's prefix",
        "saved from inside a compiled or distributed wrapper",
        ("F4", "F27"),
        "CK104",
        renamed(r"^model\.", "_orig_mod.model."),
        {QWEN: "_orig_mod.model.norm.weight", GLM: "_orig_mod.model.norm.weight"},
    ),
    Mutation(
        "names of a LoRA model",
        "an adapter was saved unmerged",
        ("F28",),
        "CK104",
        renamed(r"q_proj\.weight", "q_proj.base_layer.weight"),
        {QWEN: "model.layers.{0..11}.self_attn.q_proj.base_layer.weight"},
        ("verl#4553",),
    ),
    Mutation(
        "adapter beside the weights",
        "an adapter was saved unmerged",
        ("F28",),
        "CK110",
        added(lora),
        {QWEN: "model.layers.3.self_attn.q_proj.lora_A.weight"},
        ("verl#4553",),
    ),
    Mutation(
        "Megatron's names",
        "weights were saved and not converted",
        ("F27",),
        "CK104",
        renamed(r"post_attention_layernorm", "pre_mlp_layernorm"),
        {QWEN3: "model.layers.{0..11}.pre_mlp_layernorm.weight"},
        ("slime#1780",),
    ),
    Mutation(
        "adapter files beside the weights",
        "an adapter was trained and never merged",
        ("F28",),
        "CK110",
        adapter_files,
        {QWEN: "adapter_config.json", GLM4: "adapter_model.bin"},
        ("verl#4553",),
    ),
)
