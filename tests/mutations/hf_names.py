"""Names, shapes and dtypes of an HF directory against its config.json: lost, garbled, invented, cut, rounded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mutations.configuration import settings
from mutations.edits import INDEX, names, rename, replace, shard_of, tensor, write_index
from mutations.hf_files import DEEPSEEK, EXPERT, GLM, GLM4, QWEN, QWEN3, UNTIED, WEIGHT
from mutations.mutation import EH_PROJ, EMBEDDINGS, HEAD, Damage, Mutation, at

GATE_BIASES = "model.layers.{2..12}.mlp.gate.e_score_correction_bias"


def lost(path: Path, name: str) -> None:
    """One tensor is in no shard, and the index does not list it."""
    replace(path, {}, [name])


def lost_all(part: str) -> Damage:
    """Every tensor with this part in its name is lost; the place is how a finding folds them."""
    return lambda path, folded: replace(path, {}, names(path, part))


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
    return lambda path, name: rename(path, lambda one: re.sub(old, new, one))


def added(new: Callable[[Path], dict[str, Tensor]]) -> Damage:
    """Tensors that no config promises."""
    return lambda path, name: replace(path, new(path))


def lora(path: Path) -> dict[str, Tensor]:
    return {f"model.layers.3.self_attn.q_proj.lora_{part}.weight": torch.randn(8, 128).bfloat16() for part in "AB"}


def adapter_files(path: Path, file: str) -> None:
    (path / file).write_text('{"peft_type": "LORA", "r": 8}')


def reshaped(change: Callable[[Tensor], Tensor]) -> Damage:
    """One tensor is stored in another shape or dtype; total_size stays true."""
    return lambda path, name: replace(path, {name: change(tensor(path, name))})


def merged_with(*others: str) -> Damage:
    """The tensor holds others of its layer too, which are still there."""

    def damage(path: Path, name: str) -> None:
        module, _, leaf = name.rpartition(".")
        parent = module.rpartition(".")[0]
        parts = [tensor(path, name), *(tensor(path, f"{parent}.{other}.{leaf}") for other in others)]
        replace(path, {name: torch.cat(parts)})

    return damage


def fused_turned(path: Path, name: str) -> str:
    """Fused experts [experts, out, in] as [experts, in, out] in every layer."""
    replace(path, {one: tensor(path, one).transpose(1, 2) for one in names(path, ".experts.gate_up_proj")})
    return name


def all_in(dtype: torch.dtype, part: str) -> Damage:
    """Every tensor with this part in its name in another dtype."""
    return lambda path, folded: replace(path, {name: tensor(path, name).to(dtype) for name in names(path, part)})


def shard_in(name: str, dtype: torch.dtype) -> Damage:
    """The shard of a tensor was converted with another dtype."""

    def damage(path: Path, folded: str) -> None:
        shard = shard_of(path, name)
        content = {key: value.to(dtype) for key, value in load_file(shard).items()}
        save_file(content, shard, metadata={"format": "pt"})
        write_index(path, json.loads((path / INDEX).read_text())["weight_map"])

    return damage


MUTATIONS = {
    # Lost
    "tensor lost everywhere": Mutation("F1 F4", "CK104", lost, WEIGHT),
    "router lost": Mutation("F1", "CK104", lost, at("model.layers.4.mlp.gate.weight", QWEN3, DEEPSEEK)),
    "router biases lost": Mutation("F9", "CK104", lost_all("e_score_correction_bias"), {GLM: GATE_BIASES}),
    "attention biases lost": Mutation(
        "F5 F27", "CK104", lost_all("k_proj.bias"), {QWEN: "model.layers.{0..11}.self_attn.k_proj.bias"}
    ),
    "query and key norms lost": Mutation(
        "F5 F27", "CK104", lost_all("self_attn.q_norm"), {QWEN3: "model.layers.{0..11}.self_attn.q_norm.weight"}
    ),
    "output layer lost": Mutation("F19", "CK104", lost, at(HEAD, UNTIED, QWEN3, GLM4)),
    "MTP layer lost": Mutation("F6", "CK202", never_exported("model.layers.12."), at(EH_PROJ, GLM, DEEPSEEK)),
    "MTP projection lost": Mutation("F6", "CK104", lost, {GLM: EH_PROJ, DEEPSEEK: "model.layers.12.enorm.weight"}),
    "expert lost in one layer": Mutation(
        "F1 F8",
        "CK104",
        lost_all("layers.9.mlp.experts.11."),
        {QWEN3: "model.layers.9.mlp.experts.11.down_proj.weight"},
    ),
    # Garbled
    "experts under garbled names": Mutation(
        "F8",
        "CK104",
        renamed(r"experts\.(\d+)\.(\w+)\.weight", r"experts.\2.weight\1"),
        {QWEN3: "model.layers.{0..11}.mlp.experts.gate_proj.weight11"},
    ),
    "experts numbered from one": Mutation(
        "F8",
        "CK104",
        renamed(r"experts\.11\.", "experts.12."),
        {
            QWEN3: "model.layers.{0..11}.mlp.experts.12.up_proj.weight",
            GLM: "model.layers.{2..11}.mlp.experts.12.up_proj.weight",
        },
    ),
    "layers numbered from one": Mutation(
        "F21", "CK104", renamed(r"layers\.0\.", "layers.99."), {QWEN: "model.layers.99.mlp.up_proj.weight"}
    ),
    "names with a wrapper's prefix": Mutation(
        "F4 F27", "CK104", renamed(r"^model\.", "_orig_mod.model."), at("_orig_mod.model.norm.weight", QWEN, GLM)
    ),
    "names of a LoRA model": Mutation(
        "F28",
        "CK104",
        renamed(r"q_proj\.weight", "q_proj.base_layer.weight"),
        {QWEN: "model.layers.{0..11}.self_attn.q_proj.base_layer.weight"},
    ),
    "adapter beside the weights": Mutation(
        "F28", "CK110", added(lora), {QWEN: "model.layers.3.self_attn.q_proj.lora_A.weight"}
    ),
    "Megatron's names": Mutation(
        "F27",
        "CK104",
        renamed(r"post_attention_layernorm", "pre_mlp_layernorm"),
        {QWEN3: "model.layers.{0..11}.pre_mlp_layernorm.weight"},
    ),
    "adapter files beside the weights": Mutation(
        "F28", "CK110", adapter_files, {QWEN: "adapter_config.json", GLM4: "adapter_model.bin"}
    ),
    # Shapes
    "vocabulary cut to the tokenizer": Mutation(
        "F23", "CK105", reshaped(lambda t: t[:340]), {QWEN: EMBEDDINGS, UNTIED: HEAD, GLM: HEAD}
    ),
    "vocabulary still padded": Mutation(
        "F23", "CK105", reshaped(lambda t: torch.cat([t, t[:32] * 0])), at(EMBEDDINGS, QWEN, GLM)
    ),
    "weight turned": Mutation(
        "F7", "CK105", reshaped(lambda t: t.T), {QWEN: "model.layers.3.mlp.down_proj.weight", QWEN3: EXPERT}
    ),
    "q, k and v in one": Mutation(
        "F7 F25", "CK105", merged_with("k_proj", "v_proj"), at("model.layers.3.self_attn.q_proj.weight", QWEN, QWEN3)
    ),
    "gate and up in one": Mutation(
        "F7",
        "CK105",
        merged_with("up_proj"),
        {GLM: "model.layers.5.mlp.experts.7.gate_proj.weight", DEEPSEEK: "model.layers.1.mlp.gate_proj.weight"},
    ),
    "fused experts turned": Mutation(
        "F7", "CK105", fused_turned, {"glm4_moe/fused": "model.layers.{2..11}.mlp.experts.gate_up_proj"}
    ),
    "expert half as wide": Mutation("F4 F8", "CK105", reshaped(lambda t: t[:48]), at(EXPERT, GLM, QWEN3)),
    "one expert fewer in a router": Mutation(
        "F8", "CK105", reshaped(lambda t: t[:11]), at("model.layers.7.mlp.gate.weight", QWEN3, DEEPSEEK)
    ),
    # Dtypes
    "one tensor in float16": Mutation(
        "F9",
        "CK107",
        reshaped(lambda t: t.half()),
        {QWEN: "model.layers.9.self_attn.o_proj.weight", GLM: EXPERT, GLM4: "model.layers.9.input_layernorm.weight"},
    ),
    "one shard in float16": Mutation(
        "F9", "CK107", shard_in(EXPERT, torch.float16), {QWEN3: "model.layers.5.mlp.experts.{0..11}.up_proj.weight"}
    ),
    "router biases in bfloat16": Mutation(
        "F9", "CK107", all_in(torch.bfloat16, "e_score_correction_bias"), {GLM: GATE_BIASES}, severity="warning"
    ),
    "weights in float8 silently": Mutation(
        "F14",
        "CK107",
        all_in(torch.float8_e4m3fn, "down_proj.weight"),
        {QWEN: "model.layers.{0..11}.mlp.down_proj.weight"},
    ),
    "config.json says float32": Mutation(
        "F9", "CK107", settings(dtype="float32"), at("config.json", QWEN, GLM), severity="warning"
    ),
}
