"""Packs and unpacks INT4 codes, eight to an int32 word, in compressed-tensors' order.

Element i of a row goes to word i // 8, bits 4 * (i % 8) and up, stored as code + 8 (so 0..15). The bytes are those of
compressed-tensors' `pack_to_int32`, which needs int32 temporaries of 8 bytes a code and takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quant.formats.scheme import CODES_PER_WORD as CODES_PER_WORD

if TYPE_CHECKING:
    from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """Packs int8 [rows, columns] in -8..7, with columns divisible by 8, to int32 [rows, columns / 8]."""
    import torch

    if not codes.numel():
        return codes.new_empty((codes.shape[0], codes.shape[1] // CODES_PER_WORD), dtype=torch.int32)
    # Two neighbours seen as one little-endian int16: the first is its low byte.
    pairs = (codes + 8).view(torch.int16)
    return ((pairs & 0xF) | (pairs >> 4)).to(torch.uint8).view(torch.int32)


def pack_zero_point(zero_point: Tensor) -> Tensor:
    """Packs zero points along the rows: int8 [..., rows, groups] in -8..7 to int32 [..., ceil(rows / 8), groups].

    Nibbles after the last row are 0. Source: compressed-tensors `pack_to_int32` with `packed_dim=0`.
    """
    import torch

    *batch, rows, groups = zero_point.shape
    padded = torch.nn.functional.pad(zero_point + 8, (0, 0, 0, -rows % CODES_PER_WORD))
    nibbles = padded.view(*batch, padded.shape[-2] // CODES_PER_WORD, CODES_PER_WORD, groups).int()
    places = torch.arange(0, 32, 4, dtype=torch.int32, device=zero_point.device)
    return (nibbles << places.unsqueeze(-1)).sum(-2, dtype=torch.int32)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Unpacks int32 [rows, ceil(columns / 8)] to int8 [rows, columns] in -8..7; `shape`: [rows, columns]."""
    import torch

    rows, columns = shape
    pairs = packed.contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).view(torch.int8)
    return codes.reshape(rows, packed.shape[1] * CODES_PER_WORD)[:, :columns] - 8


def unpack_zero_point(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Unpacks zero points along the rows: int32 [ceil(rows / 8), groups] to int8 [rows, groups] in -8..7."""
    import torch

    rows, groups = shape
    # Copied: a transposed single row of words counts as contiguous, but cannot be viewed as bytes.
    return unpack(packed.T.clone(memory_format=torch.contiguous_format), (groups, rows)).T


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
