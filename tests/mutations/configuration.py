"""config.json and the files beside the weights: of another model, changed on the way, at odds with each other, lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations.edits import edit_config, edit_json
from mutations.hf_files import DEEPSEEK, GLM, QWEN, QWEN3, UNTIED
from mutations.mutation import EH_PROJ, HEAD, Damage, Mutation, at

ONLY_CONFIG = at("config.json", QWEN, "glm4_moe/int4")
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def settings(**values: Any) -> Damage:
    """config.json says something else."""
    return lambda path, place: edit_config(path, **values)


def text(content: str) -> Damage:
    """A file says this and nothing else."""
    return lambda path, file: (path / file).write_text(content)


def no_file(path: Path, file: str) -> None:
    (path / file).unlink()


def in_file(file: str, change: Callable[[Any], object]) -> Damage:
    """A JSON file beside the weights is changed; a finding names what the place says."""
    return lambda path, place: edit_json(path / file, change)


def rope(**values: Any) -> Damage:
    """Rotary settings in the spelling of transformers v5."""
    return lambda path, place: edit_json(path / "config.json", lambda config: config["rope_parameters"].update(values))


def without_rope(path: Path, place: str) -> None:
    """What a reader of the other spelling sees: no rotary settings at all."""
    edit_json(path / "config.json", lambda config: config.pop("rope_parameters"))


def more_tokens(tokenizer: dict[str, Any]) -> None:
    """As many added tokens as a fine-tuning recipe adds without resizing the embedding."""
    special = dict(tokenizer["added_tokens"][-1])
    tokenizer["added_tokens"] += [special | {"id": number, "content": f"<extra{number}>"} for number in range(340, 400)]


MUTATIONS = {
    "one layer less in config.json": Mutation(
        "F5",
        "CK104",
        settings(num_hidden_layers=11, layer_types=None, max_window_layers=None),
        {QWEN: "model.layers.11.mlp.up_proj.weight"},
    ),
    "one layer more in config.json": Mutation(
        "F5",
        "CK104",
        settings(num_hidden_layers=13, layer_types=None, max_window_layers=None),
        {QWEN: "model.layers.12.mlp.up_proj.weight"},
    ),
    "more experts in config.json": Mutation(
        "F5 F8", "CK104", settings(num_experts=16), {QWEN3: "model.layers.{0..11}.mlp.experts.{12..15}.up_proj.weight"}
    ),
    "dense layers taken for MoE layers": Mutation(
        "F5",
        "CK104",
        settings(first_k_dense_replace=1),
        {GLM: "model.layers.1.mlp.gate.weight", DEEPSEEK: "model.layers.{1..2}.mlp.gate.weight"},
    ),
    "MTP layer that config.json does not promise": Mutation(
        "F6", "CK104", settings(num_nextn_predict_layers=0), at(EH_PROJ, GLM, DEEPSEEK)
    ),
    "tied flag beside an output layer": Mutation(
        "F19", "CK211", settings(tie_word_embeddings=True), at(HEAD, UNTIED, GLM)
    ),
    "tied flag at the top of a multimodal config": Mutation(
        "F19", "CK705", settings(tie_word_embeddings=True), {"kimi_k25/hf": "tie_word_embeddings"}
    ),
    "untied flag without an output layer": Mutation("F19", "CK104", settings(tie_word_embeddings=False), {QWEN: HEAD}),
    "config.json missing": Mutation("F5 F24", "CK101", no_file, ONLY_CONFIG),
    "config.json cut short": Mutation("F2", "CK101", text('{"model_type": "qwen2", "hidd'), ONLY_CONFIG),
    "config.json of an unknown model": Mutation("F27", "CK101", settings(model_type="unheard_of"), ONLY_CONFIG),
    "config.json without sizes": Mutation("F5", "CK101", settings(hidden_size="many"), ONLY_CONFIG),
    "norm epsilon changed": Mutation(
        "F5", "CK702", settings(rms_norm_eps=1e-3), at("rms_norm_eps", GLM, QWEN), with_source=True
    ),
    "rotary base changed": Mutation(
        "F18", "CK702", rope(rope_theta=10000.0), {DEEPSEEK: "rope_theta"}, with_source=True
    ),
    "rotary settings lost": Mutation("F18", "CK702", without_rope, {DEEPSEEK: "rotary"}, with_source=True),
    "yarn factor changed": Mutation("F5 F18", "CK702", rope(factor=32.0), {DEEPSEEK: "factor"}, with_source=True),
    "both rotary spellings, two bases": Mutation(
        "F18", "CK704", settings(rope_theta=500000.0), at("rope_theta", DEEPSEEK, QWEN3), cheapest="headers"
    ),
    "routed scaling factor changed": Mutation(
        "F5", "CK702", settings(routed_scaling_factor=1.0), at("routed_scaling_factor", GLM, DEEPSEEK), with_source=True
    ),
    "fewer experts a token": Mutation(
        "F5", "CK702", settings(num_experts_per_tok=2), at("num_experts_per_tok", QWEN3, GLM), with_source=True
    ),
    "router weights normalized or not": Mutation(
        "F5", "CK702", settings(norm_topk_prob=False), {QWEN3: "norm_topk_prob"}, with_source=True
    ),
    "expert groups changed": Mutation("F5", "CK702", settings(n_group=2), {DEEPSEEK: "n_group"}, with_source=True),
    "router scores by softmax": Mutation("F5", "CK101", settings(scoring_func="softmax"), {DEEPSEEK: "scoring_func"}),
    "another activation": Mutation("F5", "CK101", settings(hidden_act="gelu"), {QWEN: "hidden_act"}),
    "shorter context": Mutation(
        "F5", "CK702", settings(max_position_embeddings=128), {QWEN: "max_position_embeddings"}, with_source=True
    ),
    "sliding window switched on": Mutation(
        "F5", "CK101", settings(use_sliding_window=True), {QWEN: "use_sliding_window"}
    ),
    # Side files
    "eos of generation_config differs": Mutation(
        "F24", "CK707", in_file(GENERATION, lambda c: c.update(eos_token_id=2)), at("eos", QWEN, GLM)
    ),
    "eos of config.json differs": Mutation("F24", "CK707", settings(eos_token_id=2), {QWEN: "eos"}),
    "eos of the tokenizer differs": Mutation(
        "F24",
        "CK707",
        in_file(TOKENIZER_CONFIG, lambda c: c.update({"eos_token": "<bos>"})),
        at("eos", QWEN, DEEPSEEK),
        severity="warning",
    ),
    "pad of generation_config differs": Mutation(
        "F24", "CK707", in_file(GENERATION, lambda c: c.update(pad_token_id=3)), {GLM: "pad"}, severity="warning"
    ),
    "more tokens than rows": Mutation("F23", "CK706", in_file(TOKENIZER, more_tokens), at(TOKENIZER, QWEN, DEEPSEEK)),
    "chat template lost": Mutation(
        "F24", "CK708", no_file, at("chat_template.jinja", QWEN, GLM, "glm4_moe/int4"), with_source=True
    ),
    "another chat template": Mutation("F24", "CK708", text("{{ messages }}\n"), {QWEN: TEMPLATE}, with_source=True),
    "another tokenizer": Mutation(
        "F24",
        "CK708",
        in_file(TOKENIZER, lambda t: t["model"]["vocab"].update(w10=11, w11=10)),
        {GLM: TOKENIZER},
        with_source=True,
    ),
}
