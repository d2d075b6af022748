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


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to a routed expert."""
    return _EXPERTS in name


def check_zero_point_layout(scheme: QuantScheme, has_experts: bool, readers: Sequence[str]) -> bool:
    """Whether to store the zero points of routed experts in SGLang's layout, which no other reader takes.

    `has_experts`: whether routed experts are quantized. Raises CkptkitError when they need zero points and `readers` is
    not SGLang alone: no layout suits SGLang and another reader.
    """
    if scheme.symmetric or not has_experts:
        return False
    if tuple(readers) == ("sglang",):
        return True
    raise CkptkitError(
        "SGLang reads the zero points of routed experts in another layout "
        "than compressed-tensors stores and every other reader takes",
        "quantize symmetrically; or, for SGLang alone, use --reader sglang",
    )


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
