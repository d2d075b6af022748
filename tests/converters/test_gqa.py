"""Configs of Llama, Mistral, Mixtral, Qwen2 MoE, Qwen3 and MiniMax-M2, in every spelling, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES
from families.case import save
from families.gqa import LLAMA3_ROPE
from families.table import config_of

from ckptkit.app.api import convert
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.ops.basic import Copy
from ckptkit.converters.planner import dims_of, rules_of, to_megatron
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint

Config = dict[str, Any]


def without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    "change",
    [
        {"low_freq_factor": 2.0},
        {"high_freq_factor": 2.0},
        {"original_max_position_embeddings": 4096},
        {"original_max_position_embeddings": None},
    ],
)
def test_llama3_rope_scaling_with_other_numbers_than_megatrons_own_is_refused(change: Config) -> None:
    config = config_of(CASES["llama-tied"])
    assert megatron_args(dims_of(config))["rope_scaling_factor"] == 32.0
    with pytest.raises(CkptkitError, match="llama3.*Megatron"):
        megatron_args(dims_of(config | {"rope_parameters": LLAMA3_ROPE | change}))


def test_llama_spellings() -> None:
    v4, v5 = config_of(CASES["llama"]), CASES["llama"].config().to_dict()
    assert v4["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_parameters" not in v4
    assert megatron_args(dims_of(v4)) == megatron_args(dims_of(v5))
    said = {
        "rotary_base": 500000,
        "use_rope_scaling": True,
        "rope_scaling_factor": 8.0,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "kv_channels": 40,
    }
    assert megatron_args(dims_of(v4)).items() >= said.items()
    old = v4 | {"rope_scaling": without(v4["rope_scaling"], "rope_type") | {"type": "llama3"}}
    assert megatron_args(dims_of(old)) == megatron_args(dims_of(v4))
    released = config_of(CASES["llama-tied"])
    assert "head_dim" not in released
    assert dims_of(released) == dims_of(released | {"head_dim": 16}) == dims_of(released | {"head_dim": None})
    assert dims_of(without(config_of(CASES["mistral"]), "rope_theta")).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("name", "window", "said"),
    [
        ("mistral", {"sliding_window": 4096}, {"window_size": (4095, 0), "window_attn_skip_freq": None}),
        ("mistral", {}, {"window_size": (4095, 0), "window_attn_skip_freq": None}),
        ("mistral", {"sliding_window": None}, {}),
        ("mistral", {"sliding_window": 32768}, {}),
        ("mixtral", {"sliding_window": 4096}, {"window_size": (4095, 0), "window_attn_skip_freq": None}),
        ("mixtral", {}, {}),
        ("mixtral", {"sliding_window": None}, {}),
    ],
)
def test_sliding_window(name: str, window: Config, said: Config) -> None:
    config = without(config_of(CASES[name]), "sliding_window") | {"max_position_embeddings": 32768} | window
    assert {key: value for key, value in megatron_args(dims_of(config)).items() if "window" in key} == said


@pytest.mark.parametrize(
    ("name", "theta"),
    [("llama", 10000.0), ("mistral", 10000.0), ("mixtral", 1e6), ("qwen3-tied", 10000.0), ("minimax_m2", 5e6)],
)
def test_rotary_base_that_a_config_without_one_means(name: str, theta: float) -> None:
    config = without(config_of(CASES[name]), "rope_parameters", "rope_theta", "rope_scaling")
    assert dims_of(config).rope_theta == dims_of(config | {"rope_theta": None}).rope_theta == theta
    # Stated in one spelling, the other is not what nothing would mean.
    assert dims_of(config | {"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}).rope_theta == 7e5


@pytest.mark.parametrize("name", ["qwen3-tied", "minimax_m2"])
def test_head_size_that_a_config_without_one_means(name: str) -> None:
    assert dims_of(without(config_of(CASES[name]), "head_dim", "rotary_dim")).head_dim == 128


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("said", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, ()),
        ({"mlp_only_layers": [7, 2, 2]}, (2, 7)),
        ({"decoder_sparse_step": 5}, (0, 1, 2, 3, 5, 6, 7, 8, 10, 11)),
        ({"mlp_only_layers": [4, 0], "decoder_sparse_step": 5}, (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11)),
    ],
)
def test_dense_layers_between_moe_layers_are_read(name: str, said: Config, dense: tuple[int, ...]) -> None:
    config = without(config_of(CASES[name]), "mlp_only_layers", "decoder_sparse_step") | said
    assert dims_of(config).dense == dense
    assert megatron_args(dims_of(config))["moe_layer_freq"] == [int(layer not in dense) for layer in range(12)]


def test_qwen2_moe_switches() -> None:
    config = config_of(CASES["qwen2_moe"])
    args = megatron_args(dims_of(config))
    said = {
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": 72,
        "moe_router_pre_softmax": True,
        "add_qkv_bias": True,
    }
    assert args.items() >= said.items()
    assert dims_of(without(config, "qkv_bias")) == dims_of(config)
    assert not megatron_args(dims_of(config | {"qkv_bias": False}))["add_qkv_bias"]
    assert not megatron_args(dims_of(config | {"norm_topk_prob": True}))["moe_router_pre_softmax"]


@pytest.mark.parametrize(
    "said",
    [
        {"rotary_dim": 16},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}},
        {
            "rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5},
            "rotary_dim": 16,
        },
    ],
)
def test_minimax_rotary_part_of_a_head(said: Config) -> None:
    config = without(config_of(CASES["minimax_m2"]), "rotary_dim", "rope_theta", "rope_scaling")
    assert dims_of(config).rotary_fraction == 1.0
    assert megatron_args(dims_of(config | said)) == megatron_args(dims_of(config_of(CASES["minimax_m2"])))
    assert megatron_args(dims_of(config | said))["rotary_percent"] == 0.5


def test_minimax_null_means_what_the_releases_say() -> None:
    config = config_of(CASES["minimax_m2"])
    keys = ["use_qk_norm", "qk_norm_type", "scoring_func", "use_routing_bias", "shared_intermediate_size"]
    keys += ["attn_type_list", "use_mtp", "num_mtp_modules"]
    assert dims_of(config | dict.fromkeys(keys)) == dims_of(without(config, *keys)) == dims_of(config)


def test_minimax_tensors_of_multi_token_prediction_are_refused(tmp_path: Path) -> None:
    extra = "model.layers.12.self_attn.q_norm.weight"
    case = CASES["minimax_m2"]
    save("minimax_m2", case, tmp_path / "as released", torch.bfloat16)
    save(
        "minimax_m2",
        replace(case, added=lambda model, dtype: {extra: torch.ones(320, dtype=dtype)}),
        tmp_path / "with more",
        torch.bfloat16,
    )
    assert HfCheckpoint(tmp_path / "as released").config["use_mtp"]
    to_megatron(HfCheckpoint(tmp_path / "as released"), "this release")
    with pytest.raises(CkptkitError, match=re.escape(extra)):
        to_megatron(HfCheckpoint(tmp_path / "with more"), "this release")


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj"),
        ("minimax_m2", "model.layers.0.mlp.experts.gate_up_proj"),
        ("exaone_moe", "model.layers.2.mlp.experts.gate_up_proj"),
        ("nemotron_h", "model.layers.3.mixer.experts.up_proj"),
    ],
)
def test_experts_under_names_that_only_transformers_v5_has_are_refused(tmp_path: Path, name: str, fused: str) -> None:
    save(name, CASES[name], tmp_path / "v5", torch.bfloat16, fused=True)
    assert fused in HfCheckpoint(tmp_path / "v5").specs
    with pytest.raises(CkptkitError, match=f"under transformers v5's own names for {name}") as error:
        convert(tmp_path / "v5", tmp_path / "megatron")
    assert "save_original_format=True" in str(error.value.hint)


def test_minimax_norms_in_both_dialects() -> None:
    """Megatron-Bridge cuts them with the heads, slime has them whole on every rank, under names of its own."""
    config, whole = config_of(CASES["minimax_m2"]), torch.arange(320)
    found = {dialect: {rule.megatron: rule for rule in rules_of(config, dialect)} for dialect in ("mcore", "slime")}
    for dialect, query, key, axis in (("mcore", "q_layernorm", "k_layernorm", 0), ("slime", "q_norm", "k_norm", None)):
        for name, width in ((query, 320), (key, 64)):
            rule = found[dialect][f"decoder.layers.11.self_attention.{name}.weight"]
            assert rule.hf == {f"model.layers.11.self_attn.{name[0]}_norm.weight": (width,)}
            assert rule.mapping.op == Copy(axis)
    assert len(found["mcore"].keys() - found["slime"].keys()) == 2 * 12
    norm = "decoder.layers.0.self_attention.{}.weight"
    assert found["mcore"][norm.format("q_layernorm")].mapping.op.shard(whole, 1, 2).tolist() == list(range(160, 320))
    assert found["slime"][norm.format("q_norm")].mapping.op.shard(whole, 1, 2).tolist() == list(range(320))
