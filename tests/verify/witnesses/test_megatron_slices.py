"""Names and slices that the Megatron witness predicts, held against values written by hand. No Megatron needed."""

from __future__ import annotations

import pytest
import torch
from support import models

from converters.planner import Rule, rules_of
from verify.witnesses.loading.bits import poison
from verify.witnesses.megatron.slices import Position, compare

RULES: dict[str, Rule] = {rule.megatron: rule for rule in rules_of(models.configs()["glm4_moe"].to_dict())}


def at(rank: int, size: int) -> Position:
    return Position(rank, size, 0, 1, range(12))


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
