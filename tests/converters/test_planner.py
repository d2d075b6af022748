"""The planner refuses everything that does not add up, before a byte is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fixture_types import PathOf

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from converters.planner import to_megatron


class Headers:
    """A checkpoint of names and shapes; reading it is an error."""

    def __init__(self, config: dict[str, Any], specs: dict[str, TensorSpec]) -> None:
        self.config, self.specs, self.groups = config, specs, [(name,) for name in specs]

    def read(self, names: object) -> dict[str, torch.Tensor]:
        raise AssertionError("the planner must not read")


def headers(path: Path) -> Headers:
    """The real checkpoint's headers."""
    checkpoint = HfCheckpoint(path)
    return Headers(dict(checkpoint.config), dict(checkpoint.specs))


def rename(checkpoint: Headers) -> None:
    spec = checkpoint.specs.pop("model.layers.11.mlp.experts.11.up_proj.weight")
    checkpoint.specs["model.layers.12.mlp.experts.11.up_proj.weight"] = spec


def wrong_shape(checkpoint: Headers) -> None:
    checkpoint.specs["model.layers.5.mlp.gate.weight"] = TensorSpec(
        "model.layers.5.mlp.gate.weight", (11, 128), "bfloat16"
    )


def extra(checkpoint: Headers) -> None:
    checkpoint.specs["model.layers.12.eh_proj.weight"] = TensorSpec(
        "model.layers.12.eh_proj.weight", (128, 256), "bfloat16"
    )


def two_dtypes(checkpoint: Headers) -> None:
    name = "model.layers.5.self_attn.k_proj.weight"
    checkpoint.specs[name] = TensorSpec(name, checkpoint.specs[name].shape, "float32")


def swapped_sizes(checkpoint: Headers) -> None:
    checkpoint.config["moe_intermediate_size"] = 160


def more_layers(checkpoint: Headers) -> None:
    checkpoint.config["num_hidden_layers"] = 13


def no_heads(checkpoint: Headers) -> None:
    del checkpoint.config["num_attention_heads"]


def unknown(checkpoint: Headers) -> None:
    checkpoint.config["model_type"] = "qwen2_audio"


def two_thetas(checkpoint: Headers) -> None:
    checkpoint.config["rope_theta"] = 12345.0


def quantized(checkpoint: Headers) -> None:
    checkpoint.config["quantization_config"] = {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, r"lacks 1 tensor\(s\) that its config promises: model.layers.11.mlp.experts.11.up_proj.weight"),
        (wrong_shape, r"model.layers.5.mlp.gate.weight \[11, 128\] bfloat16: the config promises shape \[12, 128\]"),
        (extra, r"holds 1 tensor\(s\) that no rule of this model family knows: model.layers.12.eh_proj.weight"),
        (two_dtypes, "one Megatron tensor, two dtypes"),
        (swapped_sizes, r"the config promises shape \[160, 128\]"),
        (more_layers, r"model.layers.12.input_layernorm.weight"),
        (no_heads, "config.json has no 'num_attention_heads'"),
        (unknown, "model_type 'qwen2_audio' is not supported"),
        (two_thetas, "rope_theta is 12345.0 but rope_parameters says 10000.0"),
        (quantized, "is quantized"),
    ],
)
def test_plan_of_unsupported_checkpoint_is_refused(
    releases: PathOf, change: Callable[[Headers], None], message: str
) -> None:
    checkpoint = headers(releases("glm4_moe"))
    assert to_megatron(checkpoint, "here")
    change(checkpoint)
    with pytest.raises(CkptkitError, match=message):
        to_megatron(checkpoint, "here")
