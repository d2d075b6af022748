"""The planner refuses what does not add up before a byte is read, and names values of a config that it cannot take."""

import pytest
import torch
from families import CASES, OF_A_KIND
from families.table import config_of
from support import models
from support.messages import refusal
from support.nightly import daily

from ckptkit.converters.planner import expected_hf, rules_of, to_hf, to_megatron
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint


class Headers:
    """A checkpoint of names and shapes; reading it is an error."""

    def __init__(self, config, specs):
        self.config, self.specs, self.groups = config, specs, [(name,) for name in specs]

    def read(self, names):
        raise AssertionError("the planner must not read")


def spec(name, *shape, dtype="bfloat16"):
    return {name: TensorSpec(name, shape, dtype)}


LAST, GATE = "model.layers.11.mlp.experts.11.up_proj.weight", "model.layers.5.mlp.gate.weight"
KEYS, DRAFT = "model.layers.5.self_attn.k_proj.weight", "model.layers.12.eh_proj.weight"


@pytest.mark.parametrize(
    ("specs", "config", "message"),
    [
        ({LAST: None}, {}, f"1.*{LAST}"),
        (spec(GATE, 11, 128), {}, rf"{GATE} \[11, 128\] bfloat16.*\[12, 128\]"),
        (spec(DRAFT, 128, 256), {}, f"1.*{DRAFT}"),
        (spec(KEYS, 64, 128, dtype="float32"), {}, "different dtypes"),
        ({}, {"moe_intermediate_size": 160}, r"\[160, 128\]"),
        ({}, {"num_hidden_layers": 13}, r"model.layers.12.input_layernorm.weight"),
        ({}, {"quantization_config": {}}, "is quantized"),
    ],
)
def test_plan_of_unsupported_checkpoint_is_refused(releases, specs, config, message):
    checkpoint = HfCheckpoint(releases("glm4_moe"))
    own = dict(checkpoint.config), dict(checkpoint.specs)
    assert to_megatron(Headers(*own), "here")
    changed = {name: one for name, one in (own[1] | specs).items() if one is not None}
    refusal(message, to_megatron, Headers(own[0] | config, changed), "here")


@pytest.mark.parametrize("name", daily(CASES, OF_A_KIND))
def test_one_missing_and_one_unknown_tensor_are_refused_by_name(name):
    config = config_of(CASES[name])
    specs = {key: TensorSpec(key, shape, "bfloat16") for key, shape in expected_hf(config).items()}
    firsts = {id(rule.mapping): next(iter(rule.hf)) for rule in reversed(list(rules_of(config)))}
    assert len(firsts) >= 8
    extra = next(key for key in specs if "layers.3." in key).replace("layers.3.", "layers.3.surprise.")
    broken = {first: {key: one for key, one in specs.items() if key != first} for first in firsts.values()}
    for wrong, stored in (broken | {extra: specs | spec(extra, 2, 2)}).items():
        assert wrong in str(refusal("1 tensor", to_megatron, Headers(config, stored), "the release"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.float8_e4m3fn])
def test_dtype_that_weights_cannot_have_is_refused(releases, dtype):
    config = models.configs()["qwen2-tied"].to_dict()
    tensors = {name: tensor.to(dtype) for name, tensor in models.tensors(releases("qwen2-tied")).items()}
    error = refusal("bfloat16, float16.*float32", to_megatron, models.InMemory(config, tensors), "here")
    assert "config.json" in str(error.hint)


def test_a_value_that_does_not_fit_float16_is_refused(releases):
    config = models.configs()["qwen2-tied"].to_dict()
    tensors = models.tensors(releases("qwen2-tied"))
    tensors["model.norm.weight"][3] = 1e6
    view = to_megatron(models.InMemory(config, tensors), "here", "float16")
    refusal(r"decoder\.final_layernorm\.weight .*float16.*9\.99e\+05", view.read, ["decoder.final_layernorm.weight"])
    back = to_hf(to_megatron(models.InMemory(config, tensors), "here"), "here", dtype="float16")
    refusal("for float16", back.read, ["model.norm.weight"])
