"""K-EXAONE: which layers are dense, which have a window and rotary embedding, and what is refused, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from families import CASES
from families.table import config_of

from converters.megatron.argument_table import BY_NAME
from converters.megatron.arguments import megatron_args
from converters.megatron.flags import launch_flags
from converters.megatron.hybrid_model import as_gpt_args
from converters.planner import dims_of
from verify.checks.config.arguments import mismatches

CASE = CASES["exaone_moe"]
FULL = [0, 0, 0, 1] * 3


def test_full_layers_have_neither_window_nor_rotary_embedding() -> None:
    dims = dims_of(config_of(CASE))
    assert (dims.window, dims.window_layers, dims.nope_layers) == (5, (0, 1, 2, 4, 5, 6, 8, 9, 10), (3, 7, 11))
    args = megatron_args(dims)
    assert (args["window_size"], args["window_attn_skip_freq"]) == ((4, 0), [1 - one for one in FULL])
    assert args["no_rope_freq"] == FULL
    assert "--no-rope-freq '(([0]*3+[1]*1)*3)'" in launch_flags(args)
    # A window as long as the context is none, and its layers still are those with rotary embedding.
    wide = dims_of(config_of(CASE, sliding_window=256))
    assert (wide.window, wide.window_layers, wide.nope_layers) == (None, (), (3, 7, 11))


def test_hybridmodel_counts_layers_without_rotary_embedding_twice() -> None:
    dims = dims_of(config_of(CASE))
    hybrid = megatron_args(dims, "hybrid")
    assert hybrid["no_rope_freq"] == [0, 0, 0, 0, 0, 0, 1, 1] * 3
    assert as_gpt_args(hybrid)["no_rope_freq"] == FULL
    assert list(mismatches(dims, hybrid)) == []


@pytest.mark.parametrize(
    ("freq", "found"),
    [(4, tuple(FULL)), (FULL, tuple(FULL)), ([0] * 12, None), (None, None), (0, None), (3, (0, 0, 1) * 4)],
)
def test_a_launch_says_by_number_or_list_where_rotary_embedding_is_missing(freq: Any, found: Any) -> None:
    args = {**megatron_args(dims_of(config_of(CASE))), "no_rope_freq": freq}
    assert BY_NAME["no_rope_freq"].of_args(args) == found
    names = [name for name, _, _ in mismatches(dims_of(config_of(CASE)), args)]
    assert names == ([] if found == tuple(FULL) else ["no_rope_freq"])


def test_dense_layers_in_every_spelling() -> None:
    assert dims_of(config_of(CASE)).dense == (0, 1)
    assert dims_of(config_of(CASE, is_moe_layer=None)).dense == (0, 1)
    older = config_of(CASE, mlp_layer_types=None, is_moe_layer=[False] + [True] * 11, first_last_k_dense_replace=1)
    assert dims_of(older).dense == (0,)
    assert dims_of({**older, "first_k_dense_replace": 2, "is_moe_layer": None}).dense == (0, 1)


def test_what_later_releases_state_may_say_the_same() -> None:
    stated = config_of(CASE, sliding_windows=[5, 5, 5, 0] * 3, swiglu_limits=[0.0] * 12)
    assert dims_of(stated) == dims_of(config_of(CASE))
