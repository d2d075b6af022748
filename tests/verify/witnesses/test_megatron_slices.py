"""Names and slices that the Megatron witness predicts, held against values written by hand. No Megatron needed."""

from __future__ import annotations

import pytest
import torch
from support import models

from converters.planner import Rule, rules_of
from verify.witnesses.loading.bits import poison
from verify.witnesses.megatron.slices import Position, compare

RULES: dict[str, Rule] = {rule.megatron: rule for rule in rules_of(models.configs()["glm4_moe"].to_dict())}


def at(rank: int, size: int, etp_rank: int = 0, etp: int = 1) -> Position:
    return Position(rank, size, etp_rank, etp, range(12))


def test_gate_and_up_are_cut_apart() -> None:
    """Rank 1 of 2 holds the second half of the gate rows and of the up rows, not the second half of all rows."""
    rule = RULES["decoder.layers.0.mlp.linear_fc1.weight"]
    whole = torch.arange(576 * 128, dtype=torch.float32).reshape(576, 128)
    right = torch.cat([whole[144:288], whole[432:576]])
    assert compare("x", rule, whole, right, at(1, 2)).verdict == "equal"
    assert compare("x", rule, whole, whole[288:], at(1, 2)).verdict == "differs"
    assert compare("x", rule, whole, right, at(0, 2)).verdict == "differs"
    assert compare("x", rule, whole, whole, at(1, 2)).verdict == "differs"


def test_experts_follow_the_expert_tensor_parallel_size() -> None:
    rule = RULES["decoder.layers.5.mlp.experts.experts.3.linear_fc2.weight"]
    whole = torch.arange(128 * 96, dtype=torch.float32).reshape(128, 96)
    assert compare("x", rule, whole, whole, at(1, 2)).verdict == "equal"
    assert compare("x", rule, whole, whole[:, 48:].contiguous(), at(0, 1, 1, 2)).verdict == "equal"


def test_padded_rows_of_the_vocabulary_do_not_count() -> None:
    rule = RULES["embedding.word_embeddings.weight"]
    whole = torch.randn(352, 128)
    padded = torch.cat([whole, torch.full((160, 128), 7.0)])
    assert compare("x", rule, whole, padded[256:], at(1, 2)).elements == 96 * 128
    assert compare("x", rule, whole, padded[256:], at(1, 2)).verdict == "equal"
    wrong = padded.clone()
    wrong[351, 127] += 1
    seen = compare("x", rule, whole, wrong[256:], at(1, 2))
    assert (seen.verdict, seen.differing, round(seen.largest, 3)) == ("differs", 1, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_decide(dtype: torch.dtype) -> None:
    rule = RULES["decoder.final_layernorm.weight"]
    whole = torch.zeros(128, dtype=dtype)
    whole[0] = float("nan")
    assert compare("x", rule, whole, whole.clone(), at(0, 1)).verdict == "equal"
    negative = whole.clone()
    negative[1] = -0.0
    assert compare("x", rule, whole, negative, at(0, 1)).differing == 1
    untouched = torch.empty(128, dtype=dtype)
    poison([untouched])
    assert bool(untouched.isnan().all())
    assert compare("x", rule, whole, untouched, at(0, 1)).verdict == "unwritten"
    # NaN in the source is not taken for the poison
    assert compare("x", rule, torch.full((128,), float("nan"), dtype=dtype), untouched, at(0, 1)).verdict == "unwritten"
