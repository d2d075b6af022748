"""Qwen3-Next, Qwen3.5 and Qwen3-VL: configs, arguments, both dialects, and what lies on disk of linear attention."""

from __future__ import annotations

import filecmp
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES
from families.case import Case, save
from families.table import config_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.app.api import convert
from ckptkit.converters.experts import fuse, is_fused
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.megatron.parallel import ParallelSizes, refusals
from ckptkit.converters.planner import dims_of, expected_hf, rules_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.checks.config.arguments import mismatches

Config = dict[str, Any]


def test_layers_follow_from_either_spelling() -> None:
    """Configs give `layer_types`, `full_attention_interval`, both, or neither, which means an interval of four."""
    config = config_of(CASES["qwen3_next"])
    linear = (0, 1, 2, 4, 5, 6, 8, 9, 10)
    without = {key: value for key, value in config.items() if key != "layer_types"}
    for spelled in (config, without, without | {"full_attention_interval": 4}, config | {"full_attention_interval": 4}):
        net = dims_of(spelled).linear
        assert net is not None
        assert net.layers == linear
    other = dims_of(without | {"full_attention_interval": 2, "mtp_num_hidden_layers": 0})
    assert other.softmax_layers == (1, 3, 5, 7, 9, 11)


@pytest.mark.parametrize(
    ("name", "change", "layers"),
    [
        ("qwen3_next", {}, 1),  # the releases have the layer, and no key
        ("qwen3_next", {"mtp_num_hidden_layers": 0}, 0),
        ("qwen3_next", {"num_nextn_predict_layers": 0}, 0),
        ("qwen3_5", {}, 1),
        ("qwen3_5", {"mtp_num_hidden_layers": None}, 0),
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, 0),
    ],
)
def test_the_mtp_layer_follows_from_the_config(name: str, change: Config, layers: int) -> None:
    config = config_of(CASES[name], **change)
    assert dims_of(config).mtp_layers == layers
    assert ("mtp.fc.weight" in expected_hf(config)) == bool(layers)


@pytest.mark.parametrize(
    ("top", "text", "tied"), [(True, False, True), (False, True, False), (None, True, False), (None, None, False)]
)
def test_tied_embeddings_are_read_from_the_top_level(top: bool | None, text: bool | None, tied: bool) -> None:
    """transformers reads the top alone, and writes a default of its own into qwen3_vl_moe's `text_config`."""
    config = config_of(CASES["qwen3_vl_moe"], tie_word_embeddings=text) | {"tie_word_embeddings": top}
    assert dims_of(config).tied is tied


def test_arguments_are_those_of_slimes_and_megatrons_scripts() -> None:
    """slime's qwen3-next-80B-A3B.sh, of which megatron-core's names for linear attention are not part."""
    args = megatron_args(dims_of(config_of(CASES["qwen3_next"])))
    on = ("qk_layernorm", "group_query_attention", "apply_layernorm_1p", "attention_output_gate")
    slime: Config = dict.fromkeys((*on, "moe_shared_expert_gate"), True)
    slime |= dict.fromkeys(("moe_router_pre_softmax", "add_bias_linear"), False)
    slime |= {"moe_shared_expert_intermediate_size": 72, "moe_router_score_function": "softmax"}
    slime |= {"position_embedding_type": "rope", "rotary_percent": 0.25, "mtp_num_layers": 1}
    own: Config = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    }
    assert {key: args[key] for key in slime | own} == slime | own
    in_slime = megatron_args(dims_of(config_of(CASES["qwen3_next"])), "slime")
    assert in_slime == {key: value for key, value in args.items() if key not in own}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"linear_attention_freq": 4}, []),  # a number means all but every fourth
        ({"linear_attention_freq": 3}, ["linear_attention_freq"]),
        ({"linear_num_value_heads": None}, ["linear_num_value_heads"]),  # Megatron's default is 32
        ({"apply_layernorm_1p": None}, ["apply_layernorm_1p"]),
        # slime's module takes the sizes from the HF config, whatever Megatron's defaults say.
        ({"experimental_attention_variant": None, "linear_attention_freq": None, "linear_key_head_dim": 128}, []),
    ],
)
def test_arguments_of_another_model_are_found(change: Config, found: list[str]) -> None:
    dims = dims_of(config_of(CASES["qwen3_next"]))
    assert [name for name, _, _ in mismatches(dims, megatron_args(dims) | change)] == found


def test_key_heads_must_divide_over_the_ranks() -> None:
    dims = dims_of(config_of(CASES["qwen3_5"], linear_num_key_heads=2))
    assert [one.actual for one in refusals(dims, ParallelSizes(4, etp=4))] == [
        "num_attention_heads = 10",
        "linear_num_key_heads = 2",
    ]


def test_a_moe_config_of_qwen3_5_needs_no_intermediate_size() -> None:
    config = config_of(CASES["qwen3_5_moe"])
    assert "intermediate_size" not in config["text_config"]
    assert megatron_args(dims_of(config))["ffn_hidden_size"] == 96


def four_layers(name: str) -> Case:
    """A smaller model of the same family."""
    case = CASES[name]

    def config() -> Any:
        made = case.config()
        text = getattr(made, "text_config", made)
        text.num_hidden_layers = 4
        if hasattr(text, "layer_types"):
            text.layer_types = text.layer_types[:4]
        return made

    return replace(case, config=config)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "release"
    save("hybrid", four_layers("qwen3_5"), path, torch.bfloat16)
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


IN_PROJ = "decoder.layers.2.self_attention.in_proj.weight"


def test_a_part_that_is_missing_is_named(release: Path, tmp_path: Path) -> None:
    convert(release, tmp_path / "megatron")
    file = tmp_path / "megatron" / "release" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.state_dict_metadata[IN_PROJ + ".z"]
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CkptkitError, match=rf"{IN_PROJ} lacks its part \.z"):
        TorchDistCheckpoint(file.parent)


def test_float32_state_is_never_rounded_and_the_norm_is_exact(release: Path, tmp_path: Path) -> None:
    """Qwen3.5 has a float32 A_log in bfloat16 releases. Megatron stores its gated norm minus one, in a wider dtype."""
    before, layer = tensors_of(release), "model.language_model.layers.1.linear_attn."
    assert before[layer + "A_log"].dtype == before[layer + "norm.weight"].dtype == torch.float32
    convert(release, tmp_path / "same")
    convert(release, tmp_path / "narrow", dtype="bfloat16")
    for name, dtype in (("same", "float64"), ("narrow", "float32")):
        megatron = TorchDistCheckpoint(tmp_path / name / "release").specs
        assert megatron["decoder.layers.1.self_attention.A_log"].dtype == "float32"
        assert megatron["decoder.layers.1.self_attention.out_norm.weight"].dtype == dtype
        convert(tmp_path / name, tmp_path / f"{name}-back")
    same, narrow = tensors_of(tmp_path / "same-back"), tensors_of(tmp_path / "narrow-back")
    assert all(torch.equal(same[name], tensor) and same[name].dtype == tensor.dtype for name, tensor in before.items())
    assert torch.equal(narrow[layer + "A_log"], before[layer + "A_log"])
    assert torch.equal(narrow[layer + "norm.weight"], before[layer + "norm.weight"].bfloat16())


def test_a_norm_that_would_be_rounded_is_refused(release: Path, tmp_path: Path) -> None:
    name = "model.language_model.layers.1.linear_attn.norm.weight"
    source = tmp_path / "tiny"
    source.mkdir()
    for file in release.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    shard = source / json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][name]
    content = load_file(shard)
    content[name] = content[name].bfloat16()
    content[name][3] = 1e-9
    save_file(content, shard, metadata={"format": "pt"})
    with pytest.raises(
        CkptkitError,
        match=rf"{name} holds values that decoder\.layers\.1\.self_attention\.out_norm\.weight would round",
    ):
        convert(source, tmp_path / "out")


FULL_ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
}


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_slime_dialect_keeps_linear_attention_as_the_hf_module(name: str) -> None:
    """The names are those in slime_plugins/models/qwen3_next.py and qwen3_5.py: `linear_attn` and `input_layernorm`."""
    config = config_of(CASES[name])
    at = ("model.language_model." if "text_config" in config else "model.") + "layers.5."
    rules = {rule.megatron: rule for rule in rules_of(config, "slime") if ".self_attention." in rule.megatron}
    linear = {key: rule for key, rule in rules.items() if key.startswith("decoder.layers.5.")}
    own = {hf: shape for hf, shape in expected_hf(config).items() if hf.startswith((f"{at}linear_attn.", f"{at}input"))}
    assert len(own) == {"qwen3_next": 8, "qwen3_5": 10}[name]
    assert {key: dict(rule.hf) for key, rule in linear.items()} == {
        hf.replace(at, "decoder.layers.5.self_attention."): {hf: shape} for hf, shape in own.items()
    }
    for rule in linear.values():
        whole = torch.randn(rule.megatron_shape)
        assert torch.equal(rule.mapping.op.merge([whole]), whole)
        assert torch.equal(rule.mapping.op.shard(whole, 1, 2), whole)
    for start in ("decoder.layers.7.", "mtp.layers.0.transformer_layer."):
        assert {key.removeprefix(start) for key in rules if key.startswith(start)} == FULL_ATTENTION


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "minimax_m2"])
def test_slimes_dialect_comes_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    case = four_layers(name)
    save(name, case, tmp_path / "release", torch.bfloat16, fused=case.fused)
    convert(tmp_path / "release", tmp_path / "megatron", dialect="slime")
    checkpoint = TorchDistCheckpoint(tmp_path / "megatron" / "release")
    assert checkpoint.specs.keys() == {rule.megatron for rule in rules_of(checkpoint.config, "slime")}
    assert "experimental_attention_variant" not in checkpoint.args
    convert(tmp_path / "megatron", tmp_path / "back")
    for file in (tmp_path / "release").iterdir():
        if file.name != "model.safetensors.index.json":
            assert filecmp.cmp(file, tmp_path / "back" / file.name, shallow=False), file.name


def test_experts_are_fused_only_where_the_release_has_them_so() -> None:
    """Qwen3.5 has the decoder's in one tensor and the MTP layer's one by one; Qwen3.6 all in one."""
    config = config_of(CASES["qwen3_5_moe"])
    names = expected_hf(config)
    specs = {name: TensorSpec(name, shape, "bfloat16") for name, shape in names.items()}
    decoder, mtp = "model.language_model.layers.3.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.gate_up_proj"

    def fused_like(*release: str) -> set[str]:
        plan = fuse(specs, config, "the model", release)
        return {spec.name for step in plan.steps for spec in step.outputs if is_fused([spec.name])}

    of_decoder = {
        f"model.language_model.layers.{layer}.mlp.experts.{name}"
        for layer in range(12)
        for name in ("gate_up_proj", "down_proj")
    }
    of_mtp = {"mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj"}
    assert fused_like(decoder) == of_decoder
    assert fused_like(mtp) == of_mtp
    assert fused_like(decoder, mtp) == fused_like() == of_decoder | of_mtp


def test_experts_of_qwen3_vl_as_transformers_saves_them_are_refused(tmp_path: Path) -> None:
    """The release stores [experts, hidden, 2 x ffn], transformers [experts, 2 x ffn, hidden] under the same names."""
    save("vl", replace(four_layers("qwen3_vl_moe"), stored=None), tmp_path / "hf", torch.bfloat16)
    with pytest.raises(CkptkitError, match=r"experts\.0\.gate_proj\.weight \[64, 192\] bfloat16.*\[96, 128\]"):
        convert(tmp_path / "hf", tmp_path / "megatron")
