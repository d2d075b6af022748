"""The table of Megatron's arguments: one row a name, and what its rows name exists."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
from families import CASES, OF_A_KIND
from families.table import config_of
from support.nightly import daily

from ckptkit.converters.config.dims import Indexer, LinearAttention, Mamba, Mla
from ckptkit.converters.megatron.argument import Argument, never, of_model
from ckptkit.converters.megatron.argument_table import ARGUMENTS, BY_NAME
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.planner import dims_of
from ckptkit.verify.checks.config.arguments import differing, mismatches

# A model that has something of everything.
DIMS = replace(
    dims_of(config_of(CASES["qwen2-tied"])),
    mla=Mla(8, 8, 8, 8, 8),
    indexer=Indexer(2, 16, 4, (0, 1)),
    linear=LinearAttention(2, 2, 8, 8, 4, (0,)),
    mamba=Mamba(4, 8, 2, 8, 4),
)


def test_fields_that_rows_name_are_those_of_a_model() -> None:
    named = {what for row in ARGUMENTS for what in (row.value, row.when, row.scope) if isinstance(what, str)}
    assert {"layers", "mla.kv_rank", "experts"} <= named
    for field in named:
        attrgetter(field)(DIMS)


def test_reports_name_sizes_first() -> None:
    """Some reports name the first three that differ. Each has one row."""
    names = [row.name for row in ARGUMENTS]
    assert sorted(names) == sorted(BY_NAME)
    assert names[:3] == ["num_layers", "hidden_size", "ffn_hidden_size"]


def test_what_no_two_models_are_compared_by() -> None:
    """What follows from others, and choices of the run."""
    never_compared = {row.name for row in ARGUMENTS if row.scope is never}
    sizes = "max_position_embeddings seq_length vocab_size padded_vocab_size make_vocab_size_divisible_by "
    switches = "group_query_attention add_position_embedding use_rotary_position_embeddings moe_grouped_gemm "
    of_run = "attention_dropout hidden_dropout init_method_std tokenizer_type moe_router_dtype moe_permute_fusion "
    others = "apply_query_key_layer_scaling rotary_seq_len_interpolation_factor "
    patterns = "hybrid_layer_pattern hybrid_override_pattern"
    assert never_compared == set(f"{sizes}{switches}{of_run}{others}{patterns}".split())


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


def changed(name: str, value: Any) -> Any:
    if name in ("position_embedding_type", "rope_type"):
        return "yarn" if value != "yarn" else "rope"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 1
    if isinstance(value, list | tuple):
        return type(value)([value[0] + 1, *value[1:]])
    return 7 if value is None else "other"


def unread(name: str, args: Mapping[str, Any]) -> bool:
    """Whether another argument leaves Megatron no choice of this."""
    if name == "position_embedding_type":
        return bool(args.get("use_rotary_position_embeddings"))
    if name in ("num_layers", "mtp_num_layers"):
        return "hybrid_layer_pattern" in args
    if name == "rope_type":
        return bool(args["rotary_scaling_factor"] == 1)
    if name == "add_qkv_bias":
        return bool(args["add_bias_linear"])
    return name == "dsa_indexer_skip_topk_offset" and args["dsa_indexer_topk_freq"] == 1


@pytest.mark.parametrize("model", daily(CASES, OF_A_KIND))
def test_each_argument_of_another_model_is_named(model: str) -> None:
    dims = dims_of(config_of(CASES[model]))
    args = megatron_args(dims)
    compared = [row for row in ARGUMENTS if row.name in args and of_model(row.scope, dims)]
    assert len(compared) > 15
    assert list(mismatches(dims, args)) == list(differing(args, args)) == []
    for row in compared:
        other = args | {row.name: changed(row.name, args[row.name])}
        found = [name for name, _, _ in mismatches(dims, other)]
        assert found[:1] == ([] if unread(row.name, args) else [row.name]), (row.name, other[row.name], found)
