"""Every value of a config that decides something is checked, and the message names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import models
from support.fixture_types import PathOf

from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from converters.planner import dims_of, to_hf, to_megatron


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_attention_heads", 6.9, "num_attention_heads is 6.9, not a whole number"),
        ("num_hidden_layers", "12", "num_hidden_layers is '12', not a whole number"),
        ("num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000, not at most 2147483648"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, not at most 1,000"),
        ("num_hidden_layers", None, "config.json has no 'num_hidden_layers'"),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false', not true or false"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan, not a finite number"),
        ("rms_norm_eps", 0, "norm_eps must be positive"),
        ("num_experts_per_tok", 13, "13 experts a token out of 12"),
        ("num_experts_per_tok", 0, "0 experts a token out of 12"),
        ("n_group", [1], r"n_group is \[1\], not a whole number"),
        ("routed_scaling_factor", "2.5", "routed_scaling_factor is '2.5', not a finite number"),
        ("rope_parameters", "yarn", "rope_parameters is 'yarn', not an object"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("n_shared_experts", 0, "without shared experts is not supported"),
        ("norm_topk_prob", False, "norm_topk_prob false is not supported"),
        ("model_type", ["glm4_moe"], "is not supported"),
    ],
)
def test_config_that_is_unsupported_is_refused_by_name(key: str, value: object, message: str) -> None:
    config = models.configs()["glm4_moe"].to_dict()
    assert dims_of(config).experts == 12
    with pytest.raises(CkptkitError, match=message):
        dims_of(config | {key: value})


@pytest.mark.parametrize(
    ("key", "default"),
    [("n_group", 1), ("topk_group", 1), ("first_k_dense_replace", 1), ("routed_scaling_factor", 1.0)],
)
def test_config_value_of_null_means_the_default(key: str, default: float) -> None:
    config = models.configs()["glm4_moe"].to_dict()
    assert dims_of(config | {key: None}) == dims_of(config | {key: default})


def test_rope_scaling_is_refused_where_megatrons_arguments_could_not_say_it(
    releases: PathOf, copy_of: Callable[[Path], Path], tmp_path: Path
) -> None:
    source = copy_of(releases("qwen2-tied"))
    config = json.loads((source / "config.json").read_text())
    for rope in (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    ):
        plain = {key: value for key, value in config.items() if key != "rope_parameters"}
        (source / "config.json").write_text(json.dumps(plain | rope))
        with pytest.raises(CkptkitError, match="rope scaling 'yarn' as it stands there has no Megatron arguments"):
            convert(source, tmp_path / "megatron")


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float64, torch.float8_e4m3fn])
def test_dtype_that_weights_cannot_have_is_refused(releases: PathOf, dtype: torch.dtype) -> None:
    config = models.configs()["qwen2-tied"].to_dict()
    tensors = {name: tensor.to(dtype) for name, tensor in models.tensors(releases("qwen2-tied")).items()}
    with pytest.raises(CkptkitError, match="a weight must be bfloat16, float16 or float32"):
        to_megatron(models.InMemory(config, tensors), "here")


def test_a_value_that_does_not_fit_float16_is_refused(releases: PathOf) -> None:
    config = models.configs()["qwen2-tied"].to_dict()
    tensors = models.tensors(releases("qwen2-tied"))
    tensors["model.norm.weight"][3] = 1e6
    view = to_megatron(models.InMemory(config, tensors), "here", "float16")
    with pytest.raises(
        CkptkitError, match=r"decoder\.final_layernorm\.weight holds values beyond float16 \(largest 9\.99e\+05\)"
    ):
        view.read(["decoder.final_layernorm.weight"])
    back = to_hf(to_megatron(models.InMemory(config, tensors), "here"), "here", dtype="float16")
    with pytest.raises(CkptkitError, match="beyond float16"):
        back.read(["model.norm.weight"])
