"""Converts zero points of routed experts from compressed-tensors' layout to SGLang's, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptkit.core.errors import CkptkitError
from quant.formats.packing import CODES_PER_WORD, pack, unpack, unpack_zero_point
from quant.formats.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

# Which of eight rows each nibble of a word holds, lowest nibble first: AWQ's order.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_EXPERTS = ".experts."
# Inputs of a tile of SGLang's Marlin kernel for experts, which chooses the smaller or the larger by how many fit a GPU
# (on an H100 the smaller). Of each tile it reads one group's zero points, and takes those of further groups from memory
# that nobody wrote. Source: `marlin_moe/marlin_template.h` of 0.5.16 and 0.5.23, whose `zp_sh_wr_pred` covers one
# group; that of dense layers is without the fault.
SMALL_TILE, LARGE_TILE = 64, 128
_READ_AS_STORED = frozenset({"vllm", "transformers"})  # readers that take compressed-tensors' own layout


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to a routed expert."""
    return _EXPERTS in name


def check_zero_point_layout(scheme: QuantScheme, has_experts: bool, readers: Sequence[str]) -> bool:
    """Whether to store the zero points of routed experts in SGLang's layout, which no other reader takes.

    `has_experts`: whether routed experts are quantized. Raises CkptkitError when they need zero points and `readers` is
    neither SGLang alone nor without it: no layout suits SGLang and another reader. slime and miles send weights to it.
    """
    if scheme.symmetric or not has_experts or (readers and _READ_AS_STORED.issuperset(readers)):
        return False
    if tuple(readers) == ("sglang",):
        if is_misread(scheme.group_size):
            raise CkptkitError(
                f"zero points of experts in groups of {scheme.group_size}: SGLang's kernel reads those of one group in "
                f"{SMALL_TILE} inputs or more, and its answers change from one request to the next",
                f"--group-size {LARGE_TILE} or channel; or quantize symmetrically",
            )
        return True
    raise CkptkitError(
        "SGLang reads the zero points of routed experts in another layout "
        "than compressed-tensors stores and every other reader takes",
        "quantize symmetrically; or, for one engine alone, use --reader sglang or --reader vllm",
    )


def is_misread(group_size: int | None) -> bool:
    """Whether SGLang's kernel for experts misses zero points of groups of this size; None: a group is a row."""
    return group_size is not None and group_size < SMALL_TILE


def for_sglang_experts(zero_point: Tensor, rows: int, name: str) -> Tensor:
    """Converts int32 [ceil(rows / 8), groups] (compressed-tensors) to int32 [groups, rows / 8] (SGLang).

    A word of the result holds eight rows in AWQ's order. Raises CkptkitError when the rows do not fill words.
    Source: SGLang `moe_awq_to_marlin_zero_points`, which takes this layout, and `FusedMoE.weight_loader`, which
    transposes everything but zero points.
    """
    if rows % CODES_PER_WORD:
        raise CkptkitError(
            f"{name}: {rows} output features do not fill words of {CODES_PER_WORD} zero points",
            "quantize symmetrically, or ignore it",
        )
    groups = zero_point.shape[1]
    codes = unpack_zero_point(zero_point, (rows, groups)).T.reshape(groups, rows // CODES_PER_WORD, CODES_PER_WORD)
    return pack(codes[:, :, list(_ORDER)].reshape(groups, rows))


def of_sglang_experts(zero_point: Tensor) -> Tensor:
    """The zero points int8 [rows, groups] of int32 [groups, rows / 8] in SGLang's layout."""
    groups, words = zero_point.shape
    codes = unpack(zero_point, (groups, words * CODES_PER_WORD)).view(groups, words, CODES_PER_WORD)
    order = [_ORDER.index(row) for row in range(CODES_PER_WORD)]
    return codes[:, :, order].reshape(groups, -1).T.contiguous()
