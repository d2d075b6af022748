"""Ling 2.0: queries, keys and values in one matrix, and configs that are refused, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from families.table import config_of
from support import models

from ckptkit.core.errors import UnsupportedError
from converters.open import open_checkpoint
from converters.planner import dims_of, to_megatron

CASE = CASES["bailing_moe"]


def test_rows_of_queries_keys_and_values_are_put_in_groups(tmp_path: Path) -> None:
    """10 heads of 32 in two groups: the release has all queries, then all keys, then all values."""
    save("bailing_moe", CASE, tmp_path, torch.bfloat16)
    hf, view = models.tensors(tmp_path), to_megatron(open_checkpoint(tmp_path), "the test model")
    name = "decoder.layers.4.self_attention.linear_qkv.weight"
    stored = hf["model.layers.4.attention.query_key_value.weight"]
    assert stored.shape == (448, 128)
    places = [(0, 160), (320, 352), (384, 416), (160, 320), (352, 384), (416, 448)]
    assert torch.equal(view.read([name])[name], torch.cat([stored[first:last] for first, last in places]))


def test_what_the_config_may_leave_out() -> None:
    absent = dict.fromkeys(("moe_shared_expert_intermediate_size", "score_function", "use_bias", "norm_head"), ...)
    dims = dims_of(config_of(CASE, **absent))
    assert dims == dims_of(config_of(CASE))
    assert (dims.rotary_fraction, dims.rope_theta, dims.dense, dims.shared_ffn) == (0.5, 600000.0, (0, 1), 192)


def test_the_first_ling_is_another_model() -> None:
    with pytest.raises(UnsupportedError, match="BailingMoeForCausalLM of model_type 'bailing_moe' is another model"):
        dims_of(config_of(CASE, architectures=["BailingMoeForCausalLM"]))
