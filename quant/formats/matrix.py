"""Holds the stored tensors of an INT4 matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
