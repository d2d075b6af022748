"""The planner refuses everything that does not add up, before a byte is read."""

from __future__ import annotations

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


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, shape, dtype)}


LAST, GATE = "model.layers.11.mlp.experts.11.up_proj.weight", "model.layers.5.mlp.gate.weight"
KEYS, DRAFT = "model.layers.5.self_attn.k_proj.weight", "model.layers.12.eh_proj.weight"


@pytest.mark.parametrize(
    ("specs", "config", "message"),
    [
        ({LAST: None}, {}, rf"lacks 1 tensor\(s\) that its config promises: {LAST}"),
        (spec(GATE, 11, 128), {}, rf"{GATE} \[11, 128\] bfloat16: the config promises shape \[12, 128\]"),
        (spec(DRAFT, 128, 256), {}, rf"holds 1 tensor\(s\) that no rule of this model family knows: {DRAFT}"),
        (spec(KEYS, 64, 128, dtype="float32"), {}, "one Megatron tensor, two dtypes"),
        ({}, {"moe_intermediate_size": 160}, r"the config promises shape \[160, 128\]"),
        ({}, {"num_hidden_layers": 13}, r"model.layers.12.input_layernorm.weight"),
        ({}, {"num_attention_heads": None}, "config.json has no 'num_attention_heads'"),
        ({}, {"model_type": "qwen2_audio"}, "model_type 'qwen2_audio' is not supported"),
        ({}, {"rope_theta": 12345.0}, "rope_theta is 12345.0 but rope_parameters says 10000.0"),
        ({}, {"quantization_config": {}}, "is quantized"),
    ],
)
def test_plan_of_unsupported_checkpoint_is_refused(
    releases: PathOf, specs: dict[str, TensorSpec | None], config: dict[str, Any], message: str
) -> None:
    checkpoint = HfCheckpoint(releases("glm4_moe"))
    own = dict(checkpoint.config), dict(checkpoint.specs)
    assert to_megatron(Headers(*own), "here")
    changed = {name: one for name, one in (own[1] | specs).items() if one is not None}
    with pytest.raises(CkptkitError, match=message):
        to_megatron(Headers(own[0] | config, changed), "here")
