"""The MTP projection of Qwen3-Next and Qwen3.5 is copied, halves unmoved."""

from __future__ import annotations

import pytest
import torch
from families import CASES

from converters.planner import rules_of


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("dialect", ["mcore", "slime"])
def test_mtp_projection_in_every_dialect_is_copied(name: str, dialect: str) -> None:
    """Megatron concatenates embedding and hidden state in that order too."""
    config = CASES[name].edit(CASES[name].config().to_dict())
    (rule,) = [rule for rule in rules_of(config, dialect) if rule.megatron == "mtp.layers.0.eh_proj.weight"]
    whole = torch.arange(128 * 256.0).reshape(128, 256)
    assert list(rule.hf.items()) == [("mtp.fc.weight", (128, 256))]
    assert torch.equal(rule.mapping.op.merge([whole]), whole)
