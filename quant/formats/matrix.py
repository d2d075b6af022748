"""Holds the stored tensors of an INT4 matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quant.formats.packing import pack, pack_zero_point

if TYPE_CHECKING:
    from torch import Tensor


class Packed(NamedTuple):
    """An INT4 matrix as it is stored.

    `words`: int32 [rows, columns / 8]. `scale`: [rows, groups], in the scheme's scale dtype or the weight's.
    `zero_point`: int32 [ceil(rows / 8), groups], packed along the rows as compressed-tensors does; None when symmetric.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Packed:
        """From int8 codes [rows, columns] and int8 zero points [rows, groups], all in -8..7."""
        return cls(pack(codes), scale, None if zero_point is None else pack_zero_point(zero_point))
