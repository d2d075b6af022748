"""INT4 codes eight to an int32 word, in compressed-tensors' order.

Element i of a row goes to word i // 8, bits 4 * (i % 8) and up, stored as code + 8 (so 0..15). Source: compressed-tensors
`pack_to_int32`, whose bytes these are; that function takes int32 temporaries of 8 bytes a code and several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

CODES_PER_WORD = 8


def pack(codes: Tensor) -> Tensor:
    """int8 [rows, columns] in -8..7, columns divisible by 8 -> int32 [rows, columns / 8]."""
    # Two neighbours seen as one little-endian int16: the first is its low byte.
    pairs = (codes + 8).view(torch.int16)
    return ((pairs & 0xF) | (pairs >> 4)).to(torch.uint8).view(torch.int32)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """int32 [rows, columns / 8] -> int8 [rows, columns] in -8..7; `shape` is [rows, columns], as `weight_shape` stores it."""
    codes: Tensor = unpack_from_int32(packed, 4, torch.Size(shape))
    return codes


def unpack_zero_point(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Zero points, which are packed along the rows: int32 [rows / 8, groups] -> int8 [rows, groups] in -8..7."""
    rows, groups = shape
    # A copy: compressed-tensors 0.20 cannot unpack the transposed view of a single row of words.
    return unpack(packed.T.clone(memory_format=torch.contiguous_format), (groups, rows)).T
