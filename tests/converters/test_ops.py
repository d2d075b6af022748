"""Every op against expectations written by hand, with numbers that tell every row apart."""

import pytest
import torch
from families import CASES
from families.table import config_of
from support.messages import refusal

from ckptkit.converters.config.dims import LinearAttention
from ckptkit.converters.families.deepseek_v32 import RotaryLast
from ckptkit.converters.ops.basic import (
    ByKeyHead,
    Copy,
    GatedQkv,
    GateUp,
    GateUpInOne,
    MinusOne,
    Qkv,
    StackedRows,
    SwapHalves,
)
from ckptkit.converters.ops.shapes import ShapeOnly, cat, shape_of
from ckptkit.converters.planner import DIALECTS, mappings_of
from ckptkit.core.errors import CkptkitError


def rows(*numbers):
    column = torch.tensor(numbers)
    return torch.stack([column, -column], dim=1)


# 2 key heads of size 1, each with 2 value heads of size 2.
NET = LinearAttention(key_heads=2, value_heads=4, key_dim=1, value_dim=2, kernel=4, layers=(0,))
# Tens are the kind (query, key, value, gate, beta, alpha), ones count the rows of a kind.
BY_KIND = (10, 11, 20, 21, *range(30, 38), *range(40, 48), *range(50, 54), *range(60, 64))
SECOND_RANK = rows(11, 21, 34, 35, 36, 37, 44, 45, 46, 47, 52, 53, 62, 63)
QKVZ = rows(10, 20, 30, 31, 32, 33, 40, 41, 42, 43, 11, 21, 34, 35, 36, 37, 44, 45, 46, 47)
BETA_ALPHA = rows(50, 51, 60, 61, 52, 53, 62, 63)
CONV = rows(*BY_KIND[:12]).reshape(12, 1, 2)
# Head n of 4 in 2 groups: query rows n0 and n1, gate rows n5 and n6; keys 60 and up, values 80 and up.
GATED = rows(10, 11, 15, 16, 20, 21, 25, 26, 30, 31, 35, 36, 40, 41, 45, 46)
GROUPS = (10, 11, 20, 21, 15, 16, 25, 26, 60, 61, 80, 81), (30, 31, 40, 41, 35, 36, 45, 46, 62, 63, 82, 83)
ROTATED = rows(3, 0, 1, 2, 7, 4, 5, 6)
# The op, what the release has, what Megatron has, and of it the last of two ranks.
OPS = [
    (Copy(), [rows(1, 2)], rows(1, 2), rows(1, 2)),
    (Copy(0), [rows(1, 2, 3, 4)], rows(1, 2, 3, 4), rows(3, 4)),
    (Copy(1), [rows(1, 2)], rows(1, 2), torch.tensor([[-1], [-2]])),
    (MinusOne(), [torch.tensor([1.0, 0.5])], torch.tensor([0.0, -0.5]), torch.tensor([0.0, -0.5])),
    (SwapHalves(), [rows(1, 2)], torch.tensor([[-1, 1], [-2, 2]]), torch.tensor([[-2, 2]])),
    (GateUp(), [rows(1, 2), rows(11, 12)], rows(1, 2, 11, 12), rows(2, 12)),
    (GateUpInOne(), [rows(1, 2, 11, 12)], rows(1, 2, 11, 12), rows(2, 12)),
    (
        Qkv(heads=4, groups=2, head_dim=2),
        [rows(0, 1, 2, 3, 4, 5, 6, 7), rows(20, 21, 22, 23), rows(30, 31, 32, 33)],
        rows(0, 1, 2, 3, 20, 21, 30, 31, 4, 5, 6, 7, 22, 23, 32, 33),
        rows(4, 5, 6, 7, 22, 23, 32, 33),
    ),
    (
        GatedQkv(heads=4, groups=2, head_dim=2),
        [GATED, rows(60, 61, 62, 63), rows(80, 81, 82, 83)],
        rows(*GROUPS[0], *GROUPS[1]),
        rows(*GROUPS[1]),
    ),
    (ByKeyHead(NET), [QKVZ, BETA_ALPHA], rows(*BY_KIND), SECOND_RANK),
    (
        StackedRows((12, 8, 4, 4), NET.in_proj),
        [rows(*BY_KIND[:12]), rows(*BY_KIND[12:20]), rows(50, 51, 52, 53), rows(60, 61, 62, 63)],
        rows(*BY_KIND),
        SECOND_RANK,
    ),
    (StackedRows((12,), NET.conv), [CONV], CONV, SECOND_RANK[:6].reshape(6, 1, 2)),
    # Two heads of four rows, of which the first three turn; every rank has all.
    (RotaryLast(head_dim=4, rope=3), [rows(*range(8))], ROTATED, ROTATED),
]


@pytest.mark.parametrize(("op", "parts", "merged", "of_rank"), OPS, ids=[type(op).__name__ for op, *_ in OPS])
def test_op_inverts_and_shards(op, parts, merged, of_rank):
    assert torch.equal(op.merge(parts), merged)
    found = op.split(merged)
    assert len(found) == len(parts)
    assert all(torch.equal(part, expected) for part, expected in zip(found, parts, strict=True))
    assert torch.equal(op.shard(merged, 1, 2), of_rank)


def test_half_of_a_group_of_gated_heads_is_cut():
    assert torch.equal(
        GatedQkv(heads=4, groups=2, head_dim=2).shard(rows(*GROUPS[0], *GROUPS[1]), 3, 4), rows(*GROUPS[1][6:])
    )


@pytest.mark.parametrize(
    ("op", "count"),
    [
        *((Copy(0), 9), (GateUp(), 10), (Qkv(6, 3, 1), 10), (GatedQkv(4, 2, 2), 24)),
        *((StackedRows((12,), NET.conv), 12), (ByKeyHead(NET), 28)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_sizes_that_do_not_divide_are_refused(op, count):
    refusal("", op.shard, torch.zeros(count, 2), 0, 3 if isinstance(op, GatedQkv) else 4)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_rule_of_every_family_has_the_shapes_that_tensors_have(dialect):
    seen = set()
    for case in CASES.values():
        for mapping in mappings_of(config_of(case), dialect):
            key = repr((mapping.op, *mapping.hf.values()))
            if key in seen:
                continue
            seen.add(key)
            op = mapping.op
            whole = op.merge([torch.empty(shape, device="meta") for shape in mapping.hf.values()])
            assert mapping.megatron_shape == whole.shape
            for index, part in enumerate(op.split(whole)):
                assert shape_of(lambda one, op=op, at=index: op.split(one[0])[at], [tuple(whole.shape)]) == part.shape
            for size in (1, 2, 4):
                real = outcome(lambda op=op, size=size, whole=whole: op.shard(whole, 0, size).shape)
                shapes = [tuple(whole.shape)]
                assert real == outcome(
                    lambda op=op, size=size, shapes=shapes: shape_of(lambda one: op.shard(one[0], 0, size), shapes)
                )
    assert len(seen) > 50


def outcome(run):
    try:
        return tuple(run())
    except CkptkitError as error:
        return str(error)


@pytest.mark.parametrize(
    ("run", "shapes", "said"),
    [
        (cat, [(3, 5), (3, 4)], r"\[3, 5\], \[3, 4\].*0"),
        (cat, [(3, 5), (3,)], r"\[3, 5\], \[3\].*0"),
        (lambda tensors: tensors[0].reshape(4, -1), [(3, 5)], r"\[3, 5\] is not \[4, -1\]"),
        (lambda tensors: tensors[0].split_with_sizes([2, 2]), [(3, 5)], r"0.*\[3, 5\].*\[2, 2\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(run, shapes, said):
    refusal(said, shape_of, run, shapes)


def test_chunks_are_those_of_torch():
    for rows in (0, 1, 7, 8):
        for count in (1, 2, 3, 5, 8):
            chunks = torch.empty(rows, 2).chunk(count)
            assert [part.shape for part in ShapeOnly((rows, 2)).chunk(count)] == [part.shape for part in chunks]
