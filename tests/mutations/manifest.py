"""Copies that are not what a manifest was made of, with no source at hand."""

from __future__ import annotations

from pathlib import Path

from mutations.hf_files import DEEPSEEK, QWEN
from mutations.mutation import Mutation
from mutations.values import one_element, valued


def append_newline(path: Path, file: str) -> None:
    (path / file).write_text((path / file).read_text() + "\n")


MUTATIONS = (
    Mutation(
        "another conversion of the release",
        "two conversions of one release differ in a tensor",
        ("F29", "F22"),
        "CK120",
        valued(one_element(0.25)),
        {QWEN: "model.layers.3.mlp.up_proj.weight", "glm4_moe/int4": "model.layers.12.eh_proj.weight"},
        with_manifest=True,
    ),
    Mutation(
        "words of another conversion",
        "two conversions of one release differ in a packed weight",
        ("F29",),
        "CK120",
        valued(lambda t: t.flip(0)),
        {"glm4_moe/int4": "model.layers.5.mlp.experts.11.down_proj.weight_packed"},
        with_manifest=True,
    ),
    Mutation(
        "tokenizer changed after the manifest",
        "a side file was replaced in a copy",
        ("F24", "F29"),
        "CK120",
        append_newline,
        {QWEN: "tokenizer.json", DEEPSEEK: "chat_template.jinja"},
        with_manifest=True,
    ),
)
