"""How readers of one config differ, each case on a concrete entry: all readers' verdicts and ckptkit's output.

The letters are those of `docs/lint.md`. Verdicts are written by hand: P packs, K keeps, R refuses the layer,
E loads either.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.published import KIMI, QWEN

from ckptkit.quant.ignore.names import matrices_named
from ckptkit.quant.ignore.readers import INT4_READERS
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.select import default_ignore
from ckptkit.quant.ignore.tree import class_tree

QWEN2 = {key: value for key, value in QWEN.items() if key not in ("num_experts", "moe_intermediate_size")} | {
    "model_type": "qwen2",
    "num_hidden_layers": 12,
}
LETTERS = {"packs": "P", "keeps": "K", "refuses": "R", "either": "E"}
L3 = "model.layers.3"


def weights(config: dict[str, Any], *more: str) -> list[str]:
    """Names of every matrix of a model, and more."""
    tree = class_tree(config)
    return [f"{module}.weight" for module in [*tree.others, *sorted(tree.linears), *more]]


def verdicts(config: dict[str, Any], ignore: list[str], module: str, *more: str) -> str:
    """The verdicts of compressed-tensors, transformers, vLLM 0.26 and 0.33, SGLang 0.5.16 and 0.5.23, and slime."""
    matrices = matrices_named(weights(config, *more), class_tree(config), config)
    index = [matrix.module for matrix in matrices].index(module)
    return "".join(
        LETTERS[reading.answers[index]] for reading in read_all(INT4_READERS, matrices, ignore, config).values()
    )


@pytest.mark.parametrize(
    ("entry", "expected"),
    [("re:.*mlp.gate$", "KKKKKKP"), (r"re:.*mlp\.gate\..*", "KKPPKKK"), (r"re:.*\.mlp\.gate(\.weight)?$", "KKKKKKK")],
)
def test_d1_module_names_and_parameter_names(entry: str, expected: str) -> None:
    """The router is a Linear to vLLM and slime alone, and only slime sees `.weight` behind the name."""
    assert verdicts(QWEN, ["lm_head", "model.embed_tokens", entry], f"{L3}.mlp.gate") == expected


@pytest.mark.parametrize(
    ("entry", "module", "expected"),
    [
        ("model.layers.1", "model.layers.1.mlp.down_proj", "PPPPKPK"),
        ("model.layers.1", "model.layers.11.mlp.down_proj", "PPPPKPK"),
        ("self_attn.o_proj", f"{L3}.self_attn.o_proj", "PPPPKKP"),
        (f"{L3}.self_attn.o_proj", f"{L3}.self_attn.o_proj", "KKKKKKK"),
        ("Linear", f"{L3}.self_attn.o_proj", "KKPPPPP"),
    ],
)
def test_plain_entries_get_these_verdicts_from_each_reader(entry: str, module: str, expected: str) -> None:
    assert verdicts(QWEN2, ["lm_head", "model.embed_tokens", entry], module) == expected


SHARDS = [f"{L3}.self_attn.{name}_proj" for name in "qkv"]


@pytest.mark.parametrize(
    ("config", "ignore", "expected"),
    [
        (QWEN2, SHARDS, "KKKKPPK"),
        (QWEN, SHARDS, "KKKKKKK"),
        (QWEN, SHARDS[:1], "KKRRRRK"),
        (QWEN2, SHARDS[:1], "KKRRPPK"),
        (QWEN2, [r"re:.*\.self_attn\.(q|k|v|qkv)_proj(\.weight)?$"], "KKKKKKK"),
        (KIMI, [f"{L3}.self_attn.q_a_proj", f"{L3}.self_attn.kv_a_proj_with_mqa"], None),
    ],
    ids=["not declared", "declared", "declared, in part", "not declared, in part", "alias", "latent"],
)
def test_entries_for_parts_of_fused_layers_get_these_verdicts(
    config: dict[str, Any], ignore: list[str], expected: str | None
) -> None:
    """Only some of SGLang's classes say what a fused layer is made of; vLLM's all do."""
    module = SHARDS[0] if expected else f"{L3}.self_attn.q_a_proj"
    assert verdicts(config, ["lm_head", *ignore], module) == (expected or "KKKKKKK")


@pytest.mark.parametrize(
    ("entry", "part", "expected"),
    [
        ("re:.*v_proj$", "self_attn.q_proj", "PPRKKKP"),
        ("re:.*v_proj$", "self_attn.v_proj", "KKRKKKP"),
        ("re:.*qkv_proj", "self_attn.q_proj", "PPPKKKP"),
        ("re:.*gate", "mlp.up_proj", "PPRKKKP"),
    ],
)
def test_d12_a_regex_that_matches_the_fused_name(entry: str, part: str, expected: str) -> None:
    """vLLM 0.33 lets it decide for all parts, as SGLang does where its class names none; vLLM 0.26 asks each part."""
    assert verdicts(QWEN2, ["lm_head", "model.embed_tokens", entry], f"{L3}.{part}") == expected


def test_d5_expert_0_answers_for_all() -> None:
    ignore = [*default_ignore(QWEN), r"re:.*\.experts\.(5|6)\..*"]
    assert verdicts(QWEN, ignore, f"{L3}.mlp.experts.5.up_proj") == "KKPPPPK"
    assert verdicts(QWEN, ignore, f"{L3}.mlp.experts.0.up_proj") == "PPPPPPP"
    assert verdicts(QWEN, [*default_ignore(QWEN), r"re:.*\.experts\.0\..*"], f"{L3}.mlp.experts.5.up_proj") == "PPKKKKP"


NEXT = {
    **QWEN,
    "model_type": "qwen3_next",
    "shared_expert_intermediate_size": 64,
    "mtp_num_hidden_layers": 0,
    "linear_num_key_heads": 2,
}
NEXT |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


def test_convolution_with_three_axes_is_packed_by_slime_only() -> None:
    assert verdicts(NEXT, ["lm_head"], "model.layers.0.linear_attn.conv1d") == "KKKKKKP"
    assert r"re:.*\.linear_attn\..*" in default_ignore(NEXT)


VISION = {"model_type": "qwen3_vl_moe", "text_config": {**QWEN, "model_type": "qwen3_vl_moe_text"}}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("model.language_model.layers.3.self_attn.o_proj", "KKKKPPK"),
        ("model.layers.3.self_attn.o_proj", "PPPPPPP"),
        (r"re:model\.layers\..*", "PPPPPPP"),
        (r"re:.*\.self_attn\.o_proj(\.weight)?$", "KKKKKKK"),
    ],
)
def test_d11_names_before_the_layers(entry: str, expected: str) -> None:
    """SGLang turns the beginning of a plain entry into that of another class than the one that it builds."""
    ignore = [*default_ignore(VISION), entry]
    assert verdicts(VISION, ignore, "model.language_model.layers.3.self_attn.o_proj") == expected
