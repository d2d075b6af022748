"""The planner refuses everything that does not add up, before a byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from families import CASES
from support.fixture_types import PathOf
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from converters.planner import expected_hf, rules_of, to_megatron


class Headers:
    """A checkpoint of names and shapes; reading it is an error."""

    def __init__(self, config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
        self.config, self.specs, self.groups = config, specs, [(name,) for name in specs]

    def read(self, names: object) -> dict[str, Tensor]:
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


@pytest.mark.parametrize("name", list(CASES))
def test_one_missing_and_one_unknown_tensor_are_refused_by_name(name: str) -> None:
    """For every rule of every family, before a byte is read."""
    config = CASES[name].edit(CASES[name].config().to_dict())
    specs = {key: TensorSpec(key, shape, "bfloat16") for key, shape in expected_hf(config).items()}
    firsts = {id(rule.mapping): next(iter(rule.hf)) for rule in reversed(list(rules_of(config)))}
    assert len(firsts) >= 8
    for first in firsts.values():
        with pytest.raises(CkptkitError, match="lacks 1 tensor.* that its config promises") as error:
            to_megatron(Headers(config, {key: spec for key, spec in specs.items() if key != first}), "the release")
        assert first in str(error.value)
    extra = next(key for key in specs if "layers.3." in key).replace("layers.3.", "layers.3.surprise.")
    with pytest.raises(CkptkitError, match="holds 1 tensor.* that no rule of this model family knows") as error:
        to_megatron(Headers(config, specs | {extra: TensorSpec(extra, (2, 2), "bfloat16")}), "the release")
    assert extra in str(error.value)
