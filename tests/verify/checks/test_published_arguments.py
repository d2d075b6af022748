"""CK701: launch arguments as people publish them, against the config.json of the releases that they are for."""

import tomllib
from pathlib import Path

import pytest
from releases.record import load
from support.messages import text_with

from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.planner import dims_of
from ckptkit.verify.checks.config.arguments import hint_of, mismatches

_WORDS = {word: word for word in ["RMSNorm", "rope", "yarn", "softmax", "sigmoid", "learnable"]}
PUBLISHED = tomllib.loads(Path(__file__).with_name("published_arguments.toml").read_text())
QWEN25, QWEN3, GLM45, DEEPSEEK, KIMI, MOONLIGHT, _, _, GPT_OSS = PUBLISHED


def args_of(model, **changes):
    pairs = (pair.partition("=") for pair in PUBLISHED[model].split())
    right = {"window_size": [127, 0], "yarn_original_max_position_embeddings": 4096} if model == GPT_OSS else {}
    return {name: eval(value, dict(_WORDS)) for name, _, value in pairs} | right | changes  # noqa: S307 - our own table


def config_of(model, **changes):
    """The published config. None of the launches trains the layer for multi-token prediction."""
    stated = {key: value for key, value in load(model).config.items() if key != "quantization_config"}
    return stated | {"num_nextn_predict_layers": 0} | changes


def wrong(config, args):
    return list(mismatches(dims_of(config), args))


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_launch_arguments_agree_with_published_configs(model):
    """All but one: Qwen2.5-1.5B's script has another base."""
    expected = [("rotary_base", "1000000", "10000")] if model == QWEN25 else []
    # Kimi K2's release says beta_fast 1, Megatron's latent attention takes 32, and no flag of Megatron-LM says it.
    expected += [("beta_fast", "1.0", "32.0")] if model == KIMI else []
    assert wrong(config_of(model), args_of(model)) == expected
    assert wrong(config_of(model), megatron_args(dims_of(config_of(model)))) == []


def test_published_launch_script_of_gpt_oss_contradicts_the_release():
    """One token too many in every window, and the rotation of a model trained with contexts 32 times as long."""
    stated = {"window_size": (128, 0), "yarn_original_max_position_embeddings": 131072}
    assert wrong(config_of(GPT_OSS), args_of(GPT_OSS, **stated)) == [
        ("yarn_original_max_position_embeddings", "4096", "131072"),
        ("window_size", "(127, 0)", "(128, 0)"),
    ]


def test_softmax_before_topk_matters_for_a_softmax_router_only():
    found = wrong(config_of(QWEN3), args_of(QWEN3, moe_router_pre_softmax=True))
    assert found == [("moe_router_pre_softmax", "False", "True")]
    assert wrong(config_of(GLM45), args_of(GLM45, moe_router_pre_softmax=False)) == []


def test_a_padded_vocabulary_holds_that_of_the_model():
    found = wrong(config_of(GLM45), args_of(GLM45, padded_vocab_size=151329))
    assert found == [("padded_vocab_size", "at least 151552", "151329")]


def test_megatron_arguments_in_equivalent_spellings_have_no_finding():
    assert wrong(config_of(QWEN3), args_of(QWEN3, moe_layer_freq=1, ffn_hidden_size=1, norm_epsilon=0.000001)) == []
    assert wrong(config_of(GLM45), args_of(GLM45, mtp_num_layers=None)) == []
    older = args_of(QWEN3, use_rotary_position_embeddings=True)
    del older["position_embedding_type"]
    assert wrong(config_of(QWEN3), older) == []


def test_what_no_flag_says_is_named_as_an_attribute():
    assert hint_of("beta_fast") == text_with("Megatron-LM")
    assert wrong(config_of(KIMI), args_of(KIMI, beta_fast=1.0)) == []
    comments = [flag for flag in launch_flags(megatron_args(dims_of(config_of(KIMI)))) if flag.startswith("#")]
    assert comments == [text_with("args.beta_fast = 1.0 32.0")]


def test_rotary_scaling_factor_of_one_means_no_yarn():
    for model, factor, expected, kinds in (
        (DEEPSEEK, 1, "40.0", ("yarn", "rope")),
        (MOONLIGHT, 40, "1.0", ("rope", "yarn")),
    ):
        assert wrong(config_of(model), args_of(model, rotary_scaling_factor=factor)) == [
            ("rope_type", *kinds),
            ("rotary_scaling_factor", expected, str(factor)),
        ]
