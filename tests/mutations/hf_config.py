"""config.json of another model: layers, experts, output layer or MTP layers that are not those of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mutations.edits import edit_config
from mutations.hf_files import DEEPSEEK, GLM, QWEN, QWEN3
from mutations.hf_names import UNTIED
from mutations.mutation import Damage, Mutation

ONLY_CONFIG = {"qwen2/hf": "config.json", "glm4_moe/int4": "config.json"}


def settings(**values: Any) -> Damage:
    """config.json says something else."""

    def damage(path: Path, place: str) -> None:
        edit_config(path, **values)

    return damage


def config_text(text: str) -> Damage:
    def damage(path: Path, file: str) -> None:
        (path / file).write_text(text)

    return damage


def no_file(path: Path, file: str) -> None:
    (path / file).unlink()


MUTATIONS = (
    Mutation(
        "one layer less in config.json",
        "the script and config.json do not count alike",
        ("F5",),
        "CK104",
        settings(num_hidden_layers=11, layer_types=None, max_window_layers=None),
        {QWEN: "model.layers.11.mlp.up_proj.weight"},
        ("slime#1059", "slime#309"),
    ),
    Mutation(
        "one layer more in config.json",
        "a layer was lost on a round trip",
        ("F5",),
        "CK104",
        settings(num_hidden_layers=13, layer_types=None, max_window_layers=None),
        {QWEN: "model.layers.12.mlp.up_proj.weight"},
        ("slime#309",),
    ),
    Mutation(
        "more experts in config.json",
        "config.json of a larger model",
        ("F5", "F8"),
        "CK104",
        settings(num_experts=16),
        {QWEN3: "model.layers.{0..11}.mlp.experts.{12..15}.up_proj.weight"},
    ),
    Mutation(
        "dense layers taken for MoE layers",
        "first_k_dense_replace of another model",
        ("F5",),
        "CK104",
        settings(first_k_dense_replace=1),
        {GLM: "model.layers.1.mlp.gate.weight", DEEPSEEK: "model.layers.{1..2}.mlp.gate.weight"},
    ),
    Mutation(
        "MTP layer that config.json does not promise",
        "num_nextn_predict_layers was overwritten",
        ("F6",),
        "CK104",
        settings(num_nextn_predict_layers=0),
        {GLM: "model.layers.12.eh_proj.weight", DEEPSEEK: "model.layers.12.eh_proj.weight"},
        ("Megatron-Bridge#4960",),
    ),
    Mutation(
        "tied flag beside an output layer",
        "config.json of a smaller sibling",
        ("F19",),
        "CK211",
        settings(tie_word_embeddings=True),
        {UNTIED: "lm_head.weight", GLM: "lm_head.weight"},
        ("vllm#31849",),
    ),
    Mutation(
        "tied flag at the top of a multimodal config",
        "a default of the outer config class",
        ("F19",),
        "CK705",
        settings(tie_word_embeddings=True),
        {"kimi_k25/hf": "tie_word_embeddings"},
        ("transformers#43429", "vllm#31849"),
    ),
    Mutation(
        "untied flag without an output layer",
        "a default of a newer transformers",
        ("F19",),
        "CK104",
        settings(tie_word_embeddings=False),
        {QWEN: "lm_head.weight"},
        ("transformers#43429",),
    ),
    Mutation("config.json missing", "only weights were copied", ("F5", "F24"), "CK101", no_file, ONLY_CONFIG),
    Mutation(
        "config.json cut short",
        "a download stopped",
        ("F2",),
        "CK101",
        config_text('{"model_type": "qwen2", "hidd'),
        ONLY_CONFIG,
    ),
    Mutation(
        "config.json of an unknown model",
        "an architecture that no mapping knows",
        ("F27",),
        "CK101",
        settings(model_type="unheard_of"),
        ONLY_CONFIG,
        ("slime#2129", "slime#1820"),
    ),
    Mutation(
        "config.json without sizes",
        "a config of defaults only",
        ("F5",),
        "CK101",
        settings(hidden_size="many"),
        ONLY_CONFIG,
    ),
)
