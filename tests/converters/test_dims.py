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
