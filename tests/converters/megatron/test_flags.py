"""Flags and comments of launch scripts: what Megatron evaluates them to, and what no flag says."""

import json
import re

import pytest
from click.testing import CliRunner
from families import CASES, OF_A_KIND
from families.table import config_of
from releases.record import load
from support.messages import text_with
from support.nightly import daily

from ckptkit.app.api import model_arguments
from ckptkit.app.cli import cli
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args, pattern
from ckptkit.converters.planner import dims_of

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e\+\d+)?(?![\w.])")


@pytest.mark.parametrize(
    ("values", "text"),
    [([0] * 3 + [1] * 58, "([0]*3+[1]*58)"), ([1, 1, 1, 0] * 12, "(([1]*3+[0]*1)*12)"), ([0, 1, 1], "([0]*1+[1]*2)")],
)
def test_a_pattern_is_what_megatron_evaluates_it_to(values, text):
    assert pattern(values) == text
    assert eval(text) == values  # noqa: S307 - as Megatron's `moe_freq_type` does


# What a model depends on of what Megatron-LM's `load_args_from_checkpoint` takes from a checkpoint; whatever is absent
# there stays at Megatron's own default, which is another model.
_TAKEN = """
num_layers hidden_size ffn_hidden_size seq_length num_attention_heads num_query_groups group_query_attention
kv_channels max_position_embeddings position_embedding_type add_position_embedding use_rotary_position_embeddings
rotary_base rotary_percent rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu
untie_embeddings_and_output_weights apply_layernorm_1p normalization apply_query_key_layer_scaling attention_dropout
hidden_dropout num_experts mtp_num_layers moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
moe_grouped_gemm moe_shared_expert_intermediate_size moe_router_score_function moe_router_enable_expert_bias
moe_router_topk_scaling_factor padded_vocab_size
""".split()  # noqa: SIM905 - seven lines instead of forty


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "zai-org/GLM-4.5"])
def test_checkpoint_args_have_all_that_megatron_reads(model):
    args = megatron_args(dims_of(load(model).config))
    assert [name for name in _TAKEN if name not in args] == []
    assert args["attention_dropout"] == args["hidden_dropout"] == 0.0


def run(*words):
    done = CliRunner().invoke(cli, list(map(str, words)))
    assert done.exit_code == 0
    return done.output


def printed(root, config):
    (root / "config.json").write_text(json.dumps(config))
    first, *lines, last = run("inspect", "--megatron-args", root).splitlines()
    assert (first, last) == ("MODEL_ARGS=(", ")")
    as_json, args = json.loads(run("inspect", "--megatron-args", "--json", root)), megatron_args(dims_of(config))
    lines = [line.strip() for line in lines]
    assert as_json.items() >= json.loads(json.dumps(args)).items()
    assert [one for one in as_json.get("no_argument_for", []) if one not in comments(lines)] == []
    return lines


def comments(lines):
    """Without the words that all of them begin with."""
    return [line.partition(": ")[2] for line in lines if line.startswith("# no flag")]


def test_queries_scaled_by_position_are_said_by_inspect_and_convert(releases, tmp_path):
    """megatron-core 0.19.2 has no such scale; its logits equal transformers' up to there (`test_families.py`)."""
    config = config_of(CASES["ministral3"])
    (said,) = comments(printed(tmp_path, config))
    assert said == text_with("queries 16 Megatron Megatron-Bridge's Ministral 3")
    told = run("convert", releases("ministral3"), tmp_path / "out", "--dry-run")
    assert " ".join(told.split()) == text_with("16 queries")
    unscaled = config | {"rope_parameters": config["rope_parameters"] | {"llama_4_scaling_beta": 0}}
    assert comments(printed(tmp_path, unscaled)) == []


def test_gemma3_comments_name_what_flags_cannot_build(tmp_path):
    """Megatron-Bridge's Gemma3ModelProvider has all of these, Megatron-LM's options none.

    sqrt(5376) is 73.3212, 168**-0.5 is 0.0771517.
    """
    assert comments(printed(tmp_path, load("google/medgemma-27b-it").config)) == [
        text_with("MLP approximation"),
        text_with("10000 --rotary-base"),
        text_with("8 full-attention"),
        text_with("config.softmax_scale 0.07715167498104596 0.08838834764831845"),
        text_with("embeddings times 73.3212"),
        text_with("norms MLP"),
    ]


# test_nemotron_h.py has those of a model without either.
ROTATED = [name for name in CASES if not name.startswith("nemotron_h")]


@pytest.mark.parametrize("name", daily(ROTATED, [name for name in OF_A_KIND if name in ROTATED]))
def test_flags_of_every_family_state_gate_and_rotary_embedding(name, tmp_path):
    """Against the config classes of transformers: its activation, and how its rotary embedding is scaled."""
    text = CASES[name].config().get_text_config()
    (tmp_path / "config.json").write_text(json.dumps(config_of(CASES[name])))
    args = model_arguments(tmp_path)
    lines = launch_flags(args)
    gate = getattr(text, "hidden_activation", None) or text.hidden_act
    said = {"silu": "--swiglu", "gelu_pytorch_tanh": "the gated MLP of gelu's"}[gate]
    if text.model_type == "gpt_oss":
        said = "--quick-geglu"  # transformers `GptOssExperts`, whatever hidden_act says
    assert [line for line in lines if said in line]
    ropes = text.rope_parameters
    numbers = {
        kind: [float(number) for line in lines if kind in line for number in NUMBER.findall(line)]
        for kind in ("rotary", "scaling", "interpolation")
    }
    for rope in ropes.values() if "full_attention" in ropes else [ropes]:
        assert rope["rope_theta"] in numbers["rotary"]
        # Of Llama 3's scaling, --use-rope-scaling means a factor of 8.
        usual = rope["rope_type"] == "llama3" and rope["factor"] == 8 and "--use-rope-scaling" in lines
        found = numbers["scaling"] + numbers["interpolation"]
        assert rope["rope_type"] == "default" or usual or rope["factor"] in found
    inexpressible = text.model_type in ("gemma3_text", "minimax_m2", "ministral3") or name == "llama-tied"
    assert bool(args.get("no_argument_for")) == inexpressible


def test_a_rope_factor_that_no_builder_of_megatron_hands_on_is_a_comment_and_no_flag(tmp_path):
    """Llama 3.2's: --rope-scaling-factor is parsed by Megatron and reaches no model."""
    lines = printed(tmp_path, config_of(CASES["llama-tied"]))
    assert not [line for line in lines if line.startswith("--rope-scaling-factor")]
    assert text_with("32 --use-rope-scaling 8 rope_scaling_factor GPTModel gpt_builders.py") in lines
