"""Faults of config.json and its neighbours: settings changed on the way, token ids that disagree, lost templates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations.edits import edit_json
from mutations.hf_config import settings
from mutations.hf_files import DEEPSEEK, GLM, QWEN, QWEN3
from mutations.mutation import Damage, Mutation

GENERATION, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def in_file(file: str, change: Callable[[Any], object]) -> Damage:
    """A JSON file beside the weights is changed; a finding names what the place says."""

    def damage(path: Path, place: str) -> None:
        edit_json(path / file, change)

    return damage


def rope(**values: Any) -> Damage:
    """Rotary settings in the spelling of transformers v5."""

    def damage(path: Path, place: str) -> None:
        edit_json(path / "config.json", lambda config: config["rope_parameters"].update(values))

    return damage


def without_rope(path: Path, place: str) -> None:
    """What a reader of the other spelling sees: no rotary settings at all."""
    edit_json(path / "config.json", lambda config: config.pop("rope_parameters"))


def no_template(path: Path, place: str) -> None:
    (path / TEMPLATE).unlink()


def another_template(path: Path, place: str) -> None:
    (path / TEMPLATE).write_text("{{ messages }}\n")


def more_tokens(tokenizer: dict[str, Any]) -> None:
    """As many added tokens as a fine-tuning recipe adds without resizing the embedding."""
    special = dict(tokenizer["added_tokens"][-1])
    tokenizer["added_tokens"] += [special | {"id": number, "content": f"<extra{number}>"} for number in range(340, 400)]


MUTATIONS = (
    Mutation(
        "norm epsilon changed",
        "config.json of a sibling",
        ("F5",),
        "CK702",
        settings(rms_norm_eps=1e-3),
        {GLM: "rms_norm_eps", QWEN: "rms_norm_eps"},
        with_source=True,
    ),
    Mutation(
        "rotary base changed",
        "transformers v4 reads a v5 config and takes its default",
        ("F18",),
        "CK702",
        rope(rope_theta=10000.0),
        {DEEPSEEK: "rope_theta"},
        ("MarinFold#184", "MarinFold#198"),
        with_source=True,
    ),
    Mutation(
        "rotary settings lost",
        "transformers v4 reads a v5 config and takes its default",
        ("F18",),
        "CK702",
        without_rope,
        {DEEPSEEK: "rotary"},
        ("vllm#42624", "DeepSpeed#8345"),
        with_source=True,
    ),
    Mutation(
        "yarn factor changed",
        "the context was extended by hand",
        ("F5", "F18"),
        "CK702",
        rope(factor=32.0),
        {DEEPSEEK: "factor"},
        ("miles#2377",),
        with_source=True,
    ),
    Mutation(
        "both rotary spellings, two bases",
        "a tool added the old spelling with its default beside the new one",
        ("F18",),
        "CK704",
        settings(rope_theta=500000.0),
        {DEEPSEEK: "rope_theta", QWEN3: "rope_theta"},
        ("MarinFold#184",),
        cheapest="headers",
    ),
    Mutation(
        "routed scaling factor changed",
        "a default instead of the release's number",
        ("F5",),
        "CK702",
        settings(routed_scaling_factor=1.0),
        dict.fromkeys((GLM, DEEPSEEK), "routed_scaling_factor"),
        with_source=True,
    ),
    Mutation(
        "fewer experts a token",
        "config.json of a sibling",
        ("F5",),
        "CK702",
        settings(num_experts_per_tok=2),
        dict.fromkeys((QWEN3, GLM), "num_experts_per_tok"),
        with_source=True,
    ),
    Mutation(
        "router weights normalized or not",
        "a flag was left out",
        ("F5",),
        "CK702",
        settings(norm_topk_prob=False),
        {QWEN3: "norm_topk_prob"},
        with_source=True,
    ),
    Mutation(
        "expert groups changed",
        "a flag was left out",
        ("F5",),
        "CK702",
        settings(n_group=2),
        {DEEPSEEK: "n_group"},
        with_source=True,
    ),
    Mutation(
        "router scores by softmax",
        "a flag was left out",
        ("F5",),
        "CK101",
        settings(scoring_func="softmax"),
        {DEEPSEEK: "scoring_func"},
    ),
    Mutation(
        "another activation",
        "config.json of another model",
        ("F5",),
        "CK101",
        settings(hidden_act="gelu"),
        {QWEN: "hidden_act"},
    ),
    Mutation(
        "shorter context",
        "config.json of a sibling",
        ("F5",),
        "CK702",
        settings(max_position_embeddings=128),
        {QWEN: "max_position_embeddings"},
        with_source=True,
    ),
    Mutation(
        "sliding window switched on",
        "a default of another release",
        ("F5",),
        "CK101",
        settings(use_sliding_window=True),
        {QWEN: "use_sliding_window"},
    ),
    # Side files
    Mutation(
        "eos of generation_config differs",
        "the server stops at another token than training did",
        ("F24",),
        "CK707",
        in_file(GENERATION, lambda c: c.update(eos_token_id=2)),
        {QWEN: "eos", GLM: "eos"},
        ("marin#4760",),
    ),
    Mutation(
        "eos of config.json differs",
        "a base model's config beside a chat model's tokenizer",
        ("F24",),
        "CK707",
        settings(eos_token_id=2),
        {QWEN: "eos"},
        ("marin#4760",),
    ),
    Mutation(
        "eos of the tokenizer differs",
        "a template's end of turn was made the tokenizer's eos",
        ("F24",),
        "CK707",
        in_file(TOKENIZER_CONFIG, lambda c: c.update({"eos_token": "<bos>"})),
        {QWEN: "eos", DEEPSEEK: "eos"},
        severity="warning",
    ),
    Mutation(
        "pad of generation_config differs",
        "a padding token was chosen while training",
        ("F24",),
        "CK707",
        in_file(GENERATION, lambda c: c.update(pad_token_id=3)),
        {GLM: "pad"},
        severity="warning",
    ),
    Mutation(
        "more tokens than rows",
        "tokens were added and the embedding was not resized",
        ("F23",),
        "CK706",
        in_file(TOKENIZER, more_tokens),
        {QWEN: TOKENIZER, DEEPSEEK: TOKENIZER},
    ),
    Mutation(
        "chat template lost",
        "a save wrote weights and tokenizer only",
        ("F24",),
        "CK708",
        no_template,
        dict.fromkeys((QWEN, GLM, "glm4_moe/int4"), "chat_template.jinja"),
        ("marin#7406", "oellm-autoexp#51"),
        with_source=True,
    ),
    Mutation(
        "another chat template",
        "a default template was shipped",
        ("F24",),
        "CK708",
        another_template,
        {QWEN: "chat_template.jinja"},
        ("marin#7406",),
        with_source=True,
    ),
    Mutation(
        "another tokenizer",
        "a token has another id",
        ("F24",),
        "CK708",
        in_file(TOKENIZER, lambda t: t["model"]["vocab"].update(w10=11, w11=10)),
        {GLM: TOKENIZER},
        ("MarinFold#184",),
        with_source=True,
    ),
)
