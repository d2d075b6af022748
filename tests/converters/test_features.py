"""Every rule of every family needs each of its tensors, and no other: refused by name before a byte is read."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from families import CASES
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from converters.planner import expected_hf, rules_of, to_megatron


class Promised:
    """A checkpoint of which only config, names and shapes are looked at."""

    groups = ()

    def __init__(self, config: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> None:
        self.config, self.specs = config, specs

    def read(self, names: object) -> dict[str, Tensor]:
        raise AssertionError("nothing may be read before the whole plan is sound")


@pytest.mark.parametrize("name", list(CASES))
def test_one_missing_and_one_unknown_tensor_are_refused_by_name(name: str) -> None:
    """For every rule of every family, before a byte is read."""
    config = CASES[name].edit(CASES[name].config().to_dict())
    specs = {key: TensorSpec(key, shape, "bfloat16") for key, shape in expected_hf(config).items()}
    firsts = {id(rule.mapping): next(iter(rule.hf)) for rule in reversed(list(rules_of(config)))}
    assert len(firsts) >= 8
    for first in firsts.values():
        with pytest.raises(CkptkitError, match="lacks 1 tensor.* that its config promises") as error:
            to_megatron(Promised(config, {key: spec for key, spec in specs.items() if key != first}), "the release")
        assert first in str(error.value)
    extra = next(key for key in specs if "layers.3." in key).replace("layers.3.", "layers.3.surprise.")
    with pytest.raises(CkptkitError, match="holds 1 tensor.* that no rule of this model family knows") as error:
        to_megatron(Promised(config, specs | {extra: TensorSpec(extra, (2, 2), "bfloat16")}), "the release")
    assert extra in str(error.value)
