"""Reports about names of tensors that are another writer's: prefixes, wrappers, adapters."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from mutations.edits import names, rename, replace, tensor

from reports.files import number_files, on_checkpoint
from reports.report import Case, Change


def renamed(new_name: Callable[[str], str]) -> Change:
    """Every tensor has another name."""
    return on_checkpoint(lambda path: rename(path, new_name))


def _lora(name: str) -> str:
    """A name as a model under an adapter saves it."""
    module = any(part in name for part in ("_proj.weight", "down_proj"))
    return "base_model.model." + (name.replace(".weight", ".base_layer.weight") if module else name)


def _as_transformers_saves(path: Path) -> None:
    """GLM-5.3-Flash under the names of transformers' modules, its experts and convolutions joined."""
    new, old = {}, list[str]()
    for name in names(path, ""):
        other = re.sub(r"hc_(attn|ffn)_(fn|base|scale)$", r"\1_hc.\2", name)
        other = re.sub(r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", other)
        if other != name:
            new[other] = tensor(path, name)
            old.append(name)
    for name in names(path, ".experts.0.down_proj.weight"):
        block = name.removesuffix(".0.down_proj.weight")
        own = [one for one in names(path, f"{block}.") if one.endswith(".down_proj.weight")]
        experts = [f"{block}.{number}" for number in range(len(own))]
        gate, up, down = ([tensor(path, f"{one}.{part}_proj.weight") for one in experts] for part in _PROJECTIONS)
        new[f"{block}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        new[f"{block}.down_proj"] = torch.stack(down)
        old += names(path, f"{block}.")
    for name in names(path, ".q_conv1d.weight"):
        three = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        new[name.replace("q_conv1d", "conv1d")] = torch.cat([tensor(path, one) for one in three])
        old += three
    replace(path, new, old)
    number_files(path)


def _as_the_trainer_names(path: Path) -> None:
    """Gemma 4's router and experts under a trainer's names, experts transposed, their scales taken into them."""
    new, old = {}, names(path, "router.per_expert_scale")
    for name in names(path, ".router.") + names(path, ".experts."):
        if name not in old:
            other = name.replace(".router.", ".moe.gate.").replace(".experts.", ".moe.experts.")
            other = other.replace("gate_up_proj", "gate_and_up_projs").replace("down_proj", "down_projs")
            new[other] = tensor(path, name).mT if ".experts." in name else tensor(path, name)
            old.append(name)
    replace(path, new, old)
    number_files(path)


def _experts_apart(path: Path) -> None:
    """Granite's experts one by one, as a quantizer saves them."""
    new, old = {}, list[str]()
    for name in names(path, "block_sparse_moe.input_linear.weight"):
        block = name.removesuffix(".input_linear.weight")
        output = f"{block}.output_linear.weight"
        for number, (both, down) in enumerate(zip(tensor(path, name), tensor(path, output), strict=True)):
            parts = zip(_PROJECTIONS, (*both.chunk(2), down), strict=True)
            new |= {f"{block}.experts.{number}.{part}_proj.weight": one for part, one in parts}
        old += [name, output]
    replace(path, new, old)
    number_files(path)


_PROJECTIONS = ("gate", "up", "down")

CASES = {
    "sglang#37679": Case(
        "granitemoehybrid/hf",
        ("block_sparse_moe.experts.{0..11}.gate_proj.weight", "config.json does not promise it"),
        on_checkpoint(_experts_apart),
    ),
    "transformers#48075": Case(
        "nemotron_h/hf",
        ("backbone.embedding.weight", "config.json does not promise it"),
        renamed(lambda name: name.replace("backbone.embeddings.", "backbone.embedding.")),
    ),
    "sglang#38616": Case(
        "glm5_next/hf",
        ("self_attn.forget_gate.f_a_proj.weight", "config.json does not promise it"),
        on_checkpoint(_as_transformers_saves),
    ),
    "Automodel#1761": Case(
        "gemma4/hf", ("router.per_expert_scale", "in no shard"), on_checkpoint(_as_the_trainer_names)
    ),
    "verl#4761": Case("qwen2-untied/hf", ("base_model.model.",), renamed(_lora)),
    "prime-rl#2640": Case(
        "qwen3_5/hf",
        ("model.language_model.language_model.language_model.", "inside their names"),
        renamed(
            lambda name: name.replace("model.language_model.", "model.language_model.language_model.language_model.")
        ),
    ),
    "llm-compressor#2752": Case(
        "qwen3_5_text-tied-tiles/int4",
        ("model.language_model.*", "the multimodal class"),
        renamed(lambda name: name.replace("model.", "model.language_model.", 1)),
    ),
    "vllm#50355": Case(
        "qwen3_5_text-tied/hf",
        ("model.language_model.*", "the multimodal class"),
        renamed(lambda name: name.replace("model.", "model.language_model.", 1)),
    ),
    "transformers#45357": Case(
        "qwen3_5/hf",
        ("model.language_model.visual.blocks",),
        renamed(lambda name: name.replace("model.visual.", "model.language_model.visual.")),
    ),
}
