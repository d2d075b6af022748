"""The table of Megatron's arguments: one row a name, and what its rows name exists."""

import pytest
from families import CASES, OF_A_KIND
from families.table import config_of
from support.nightly import daily

from ckptkit.converters.megatron.argument import Argument, of_model
from ckptkit.converters.megatron.argument_table import ARGUMENTS
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.planner import dims_of
from ckptkit.verify.checks.config.arguments import differing, mismatches


def test_a_switch_starts_as_its_options_say():
    assert not Argument("made_up", bool).starts
    off = Argument("made_up", bool, switches={"--no-made-up": False})
    assert (off.starts, off.of_args({}), off.of_args({"made_up": False})) == (True, True, False)


def test_arguments_without_a_row_are_printed_by_their_kind():
    assert launch_flags({"made_up": True, "off": False, "sizes": (1, 2), "layers": [1, 1], "none": None}) == [
        "--made-up",
        "--sizes 1,2",
        "--layers '([1]*2)'",
    ]


def changed(name, value):
    if name in ("position_embedding_type", "rope_type"):
        return "yarn" if value != "yarn" else "rope"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 1
    if isinstance(value, list | tuple):
        return type(value)([value[0] + 1, *value[1:]])
    return 7 if value is None else "other"


def unread(name, args):
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
def test_each_argument_of_another_model_is_named(model):
    dims = dims_of(config_of(CASES[model]))
    args = megatron_args(dims)
    compared = [row for row in ARGUMENTS if row.name in args and of_model(row.scope, dims)]
    assert len(compared) > 15
    assert list(mismatches(dims, args)) == list(differing(args, args)) == []
    for row in compared:
        other = args | {row.name: changed(row.name, args[row.name])}
        found = [name for name, _, _ in mismatches(dims, other)]
        assert found[:1] == ([] if unread(row.name, args) else [row.name]), (row.name, other[row.name], found)
