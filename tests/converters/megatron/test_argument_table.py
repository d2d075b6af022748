"""The table of Megatron's arguments: one row a name, and what its rows name exists."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import attrgetter

from converters.config.dims import Indexer, LinearAttention, Mamba, Mla, base_dims
from converters.megatron.argument import Argument
from converters.megatron.argument_table import ARGUMENTS, BY_NAME
from converters.megatron.flags import launch_flags

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
}
# A model that has something of everything.
DIMS = replace(
    base_dims(CONFIG, qkv_bias=False, qk_norm=False),
    mla=Mla(8, 8, 8, 8, 8),
    indexer=Indexer(2, 16, 4, (0, 1)),
    linear=LinearAttention(2, 2, 8, 8, 4, (0,)),
    mamba=Mamba(4, 8, 2, 8, 4),
)


def test_every_argument_has_one_row() -> None:
    assert [name for name, count in Counter(row.name for row in ARGUMENTS).items() if count > 1] == []


def test_fields_that_rows_name_are_those_of_a_model() -> None:
    named = {what for row in ARGUMENTS for what in (row.value, row.when, row.scope) if isinstance(what, str)}
    assert {"layers", "mla.kv_rank", "experts"} <= named
    for field in named:
        attrgetter(field)(DIMS)


def test_reports_name_sizes_first() -> None:
    """Some reports name the first three that differ."""
    names = [row.name for row in ARGUMENTS]
    assert sorted(names) == sorted(BY_NAME)
    assert names[:3] == ["num_layers", "hidden_size", "ffn_hidden_size"]


def test_a_switch_starts_as_its_options_say() -> None:
    assert not Argument("made_up", bool).starts
    off = Argument("made_up", bool, switches={"--no-made-up": False})
    assert (off.starts, off.of_args({}), off.of_args({"made_up": False})) == (True, True, False)


def test_arguments_without_a_row_are_printed_by_their_kind() -> None:
    assert launch_flags({"made_up": True, "off": False, "sizes": (1, 2), "layers": [1, 1], "none": None}) == [
        "--made-up",
        "--sizes 1,2",
        "--layers '([1]*2)'",
    ]
