"""Names in slime's dialect, as its modules and exporters have them, and the same release again."""

import pytest
import torch
from families import CASES
from families.table import config_of
from support import models
from support.nightly import daily

from ckptkit.app.api import convert
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.ops.basic import Copy
from ckptkit.converters.planner import dims_of, expected_hf, rules_of
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint

# What slime's exporter knows of a layer; it stops at any other name. Source: `megatron_to_hf/deepseekv3.py`.
EXPORTED = {
    *(f"self_attention.linear_{name}.weight" for name in ("proj", "q_down_proj", "q_up_proj", "kv_down_proj")),
    *(f"self_attention.linear_{name}.layer_norm_weight" for name in ("q_up_proj", "kv_up_proj")),
    *("self_attention.linear_kv_up_proj.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight"),
    *(f"mlp.linear_{name}" for name in ("fc1.weight", "fc1.layer_norm_weight", "fc2.weight")),
    *(f"mlp.{part}.linear_{fc}.weight" for part in ("experts.experts", "shared_experts") for fc in ("fc1", "fc2")),
    *("mlp.router.weight", "mlp.router.expert_bias"),
}
FULL_ATTENTION = {
    *(f"self_attention.linear_{name}" for name in ("qkv.layer_norm_weight", "qkv.weight", "proj.weight")),
    *(f"self_attention.{name}_layernorm.weight" for name in "qk"),
}


def test_latent_attention_has_only_names_that_slimes_exporter_knows(releases, converted, tmp_path):
    """A trainer's norms have one name: Transformer Engine's."""
    convert(releases("deepseek_v3"), tmp_path / "slime", dialect="slime")
    stored, both = (
        TorchDistCheckpoint(path / "release").metadata.tensors
        for path in (tmp_path / "slime", converted("deepseek_v3"))
    )
    assert {key.partition(".layers.")[2].partition(".")[2] for key in stored if key.startswith("decoder.layers.")} == (
        EXPORTED
    )
    local = {key for key in both if key.endswith((".q_layernorm.weight", ".kv_layernorm.weight"))}
    assert set(both) - set(stored) == local | {f"decoder.layers.{one}.pre_mlp_layernorm.weight" for one in range(3)}


def test_minimax_norms_are_whole_on_every_rank():
    """Megatron-Bridge cuts them with the heads, slime has them whole, under names of its own."""
    config, whole = config_of(CASES["minimax_m2"]), torch.arange(320)
    for dialect, names, axis, part in (
        ("mcore", ("q_layernorm", "k_layernorm"), 0, range(160, 320)),
        ("slime", ("q_norm", "k_norm"), None, range(320)),
    ):
        rules = {rule.megatron: rule for rule in rules_of(config, dialect)}
        for name, width in zip(names, (320, 64), strict=True):
            rule = rules[f"decoder.layers.11.self_attention.{name}.weight"]
            assert rule.hf == {f"model.layers.11.self_attn.{name[0]}_norm.weight": (width,)}
            assert rule.mapping.op == Copy(axis)
        query = rules[f"decoder.layers.0.self_attention.{names[0]}.weight"]
        assert query.mapping.op.shard(whole, 1, 2).tolist() == list(part)


@pytest.mark.parametrize(("name", "count"), [("qwen3_next", 8), ("qwen3_5", 10)])
def test_linear_attention_is_the_hf_module(name, count):
    """The names are those in slime_plugins/models/qwen3_next.py and qwen3_5.py: `linear_attn` and `input_layernorm`."""
    config = config_of(CASES[name])
    at = ("model.language_model." if "text_config" in config else "model.") + "layers.5."
    rules = {rule.megatron: rule for rule in rules_of(config, "slime") if ".self_attention." in rule.megatron}
    linear = {key: rule for key, rule in rules.items() if key.startswith("decoder.layers.5.")}
    own = {hf: shape for hf, shape in expected_hf(config).items() if hf.startswith((f"{at}linear_attn.", f"{at}input"))}
    assert len(own) == count
    assert {key: dict(rule.hf) for key, rule in linear.items()} == {
        hf.replace(at, "decoder.layers.5.self_attention."): {hf: shape} for hf, shape in own.items()
    }
    for rule in linear.values():
        whole = torch.randn(rule.megatron_shape)
        assert torch.equal(rule.mapping.op.merge([whole]), whole)
        assert torch.equal(rule.mapping.op.shard(whole, 1, 2), whole)
    for start in ("decoder.layers.7.", "mtp.layers.0.transformer_layer."):
        assert {key.removeprefix(start) for key in rules if key.startswith(start)} == FULL_ATTENTION


def test_arguments_of_linear_attention_are_megatron_cores_alone():
    dims = dims_of(config_of(CASES["qwen3_next"]))
    own = {name for name in megatron_args(dims) if name.startswith(("experimental_attention", "linear_"))}
    assert len(own) == 7
    assert megatron_args(dims, "slime") == {key: one for key, one in megatron_args(dims).items() if key not in own}


NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "minimax_m2")


@pytest.mark.parametrize("name", daily(NAMES, NAMES[2:]))
def test_slimes_dialect_comes_back_byte_for_byte(releases, tmp_path, name):
    release = releases(name, fused=CASES[name].fused)
    convert(release, tmp_path / "megatron", dialect="slime")
    checkpoint = TorchDistCheckpoint(tmp_path / "megatron" / "release")
    assert checkpoint.specs.keys() == {rule.megatron for rule in rules_of(checkpoint.config, "slime")}
    assert "experimental_attention_variant" not in checkpoint.args
    convert(tmp_path / "megatron", tmp_path / "back")
    before, after = models.content(release), models.content(tmp_path / "back")
    assert {file for file in before if before[file] != after[file]} <= {"model.safetensors.index.json"}
