"""Turns stored codes and scales into numbers: float8_e4m3fn, E2M1 two a byte, and powers of two as bytes.

All products are float32, rounded once to bfloat16. NVFP4's block scale is multiplied (ModelOpt) or divided
(compressed-tensors) by the tensor's scale first. The even element of a pair is in the low four bits.
Source: DeepSeek-V3 `inference/kernel.py`, `weight_dequant`; compressed-tensors `_dequantize`; OCP Microscaling Formats
1.0, sections 5.3.3 and 5.4.1; nvidia-modelopt `qtensor/nvfp4_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ckptkit.quant.formats.floats.layout import E2M1_NUMBERS, E4M3, Block, Layout
from ckptkit.storage.buffers import ON_THE_WAY, row_cuts

if TYPE_CHECKING:
    from torch import Tensor

_NAN = 0x7F  # NaN without its sign bit
_PRODUCTS, _ROWS = 1 << 14, 1 << 8  # products and rows of weights worked on at a time: they stay in the cache
_FEW = 256  # weights of a block, below which a table of its products costs more than the products


def as_float(scales: Tensor) -> Tensor:
    """Returns scales as float32; uint8 are the exponents of float8_e8m0fnu, 2^(byte - 127)."""
    import torch

    return (scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales).float()


def has_nan(weight: Tensor) -> bool:
    """Whether a float8_e4m3fn tensor holds NaN."""
    import torch

    codes = weight.view(torch.uint8).reshape(-1).numpy()
    return any(int((codes[begin:end] & _NAN).max()) == _NAN for begin, end in row_cuts(len(codes), 1, ON_THE_WAY))


def factors(layout: Layout, scales: Tensor, second: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Returns the factor of each block of a weight of `shape`, float32 [..., rows of blocks, columns of them].

    `scales` in any of `layout.scale_shapes`; `second`: the tensor's own scale, one value or one a matrix.
    """
    grid, found = layout.grid(shape), as_float(scales)
    found = found.reshape(grid) if found.numel() > 1 or found.dim() == len(grid) else found.reshape(1).expand(grid)
    if second is None:
        return found
    shared = second.float()
    shared = shared.reshape(*shared.shape, 1, 1) if shared.dim() and shared.numel() > 1 else shared.reshape(1)
    return found / shared if layout.divides else found * shared


def spread(scales: Tensor, block: Block, shape: Sequence[int]) -> Tensor:
    """Expands the scales of blocks to one scale a weight [..., rows, columns]; the last blocks may be smaller."""
    rows, columns = shape[-2:]
    down = scales.repeat_interleave(block[0] or rows, -2)[..., :rows, :]
    return down.repeat_interleave(block[1] or columns, -1)[..., :columns]


def codes_and_scales(weight: Tensor, scales: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Returns float32 codes and scales of FP8 weights [..., rows, columns] with a scale for each `block` or one."""
    found = as_float(scales)
    if block == (None, None) and found.dim() < weight.dim():
        return weight.float(), found.reshape(1).expand(weight.shape)
    return weight.float(), spread(found, block, weight.shape)


def values(layout: Layout, codes: Tensor) -> Tensor:
    """Returns the number of each code, float32 [..., rows, columns]."""
    import torch

    if layout.number == E4M3:
        return torch.from_numpy(np.take(e4m3_values().numpy(), codes.contiguous().view(torch.uint8).numpy()))
    flat = codes.contiguous().view(torch.uint8)
    pairs = torch.from_numpy(np.take(_pairs()[127 * 256 : 128 * 256], flat.numpy())).view(torch.bfloat16)  # scale 1
    return (pairs.flatten(-2) if layout.axes == "groups" else pairs).float()


def dequantize(layout: Layout, codes: Tensor, scales: Tensor, second: Tensor | None = None) -> Tensor:
    """Returns a weight in bfloat16 [..., rows, columns]; codes and scales are in `layout`."""
    import torch

    if layout.number != E4M3 and second is None and scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return _powers(codes, scales.view(torch.uint8))
    shape = codes.shape if layout.number == E4M3 else (*codes.shape[:-1], codes.shape[-1] * 2)
    found = factors(layout, scales, second, tuple(shape))
    height, width = layout.block[0] or shape[-2], layout.block[1] or shape[-1]
    if layout.number == E4M3 and (height * width >= _FEW or shape[-1] % width):
        return scaled(codes, found, (height, width))
    return _few(layout, codes, found, tuple(shape), height)


def _few(layout: Layout, codes: Tensor, found: Tensor, shape: tuple[int, ...], height: int) -> Tensor:
    """Does the same as `dequantize` for scales of few weights, all in complete blocks."""
    import torch

    result = torch.empty(shape, dtype=torch.bfloat16)
    rows, columns = shape[-2:]
    stored, target = codes.reshape(-1, rows, codes.shape[-1]), result.view(-1, rows, columns)
    for matrix, several in enumerate(found.reshape(-1, *found.shape[-2:])):
        for begin, end in row_cuts(rows, columns * 4, ON_THE_WAY):
            scale = several[torch.arange(begin, end) // height].unsqueeze(-1)
            product = values(layout, stored[matrix, begin:end]).reshape(end - begin, scale.shape[1], -1) * scale
            target[matrix, begin:end] = product.flatten(-2).to(torch.bfloat16)
    return result


def scaled(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiplies weights by the scales of their blocks, of which the last ones may be smaller.

    float8_e4m3fn [..., rows, columns], float32 [..., rows / block, columns / block] -> bfloat16 [..., rows, columns].
    The 256 products of each block are computed once and looked up. This is several times as fast as torch's conversion
    of float8 and gives the same bits.
    """
    import torch

    height, width = block
    (rows, columns), (down, across) = weight.shape[-2:], scales.shape[-2:]
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    codes = weight.view(torch.uint8).reshape(-1, rows, columns).numpy()
    found = result.view(torch.int16).view(-1, rows, columns).numpy()
    # Several rows of blocks at a time; each row has its own range of the products.
    several = max(1, min(down, _PRODUCTS // (across * 256), _ROWS // height))
    places = np.arange(columns, dtype=np.intp) // width * 256
    if several > 1:
        places = places + np.arange(several, dtype=np.intp).repeat(height)[:, None] * (across * 256)
    for matrix, factor in enumerate(scales.reshape(-1, down, across)):
        for start in range(0, down, several):
            products = (factor[start : start + several].unsqueeze(-1) * e4m3_values()).to(torch.bfloat16)
            table = products.view(torch.int16).flatten().numpy()
            first, last = start * height, min((start + several) * height, rows)
            for begin, end in row_cuts(last - first, places.itemsize * columns, ON_THE_WAY):
                at = slice(first + begin, first + end)
                index = codes[matrix, at] + (places[begin:end] if several > 1 else places)
                np.take(table, index, out=found[matrix, at], mode="clip")
    return result


def _powers(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes pairs of E2M1 with a power of two for each 32, exactly: bfloat16 [..., rows, columns].

    `codes`: uint8 or int8 [..., rows, groups, 16] or [..., rows, columns / 2]. `scales`: uint8 [..., rows, groups].
    """
    import torch

    *lead, rows, groups = scales.shape
    stored = codes.contiguous().view(torch.uint8).reshape(-1, rows, groups, codes.numel() // max(1, scales.numel()))
    powers = scales.reshape(-1, rows, groups)
    result = torch.empty(stored.shape[0], rows, groups * stored.shape[-1] * 2, dtype=torch.bfloat16)
    for matrix in range(len(stored)):
        for begin, end in row_cuts(rows, groups * stored.shape[-1] * np.dtype(np.intp).itemsize, ON_THE_WAY):
            at = slice(begin, end)
            index = (powers[matrix, at].numpy().astype(np.intp) << 8)[..., None] + stored[matrix, at].numpy()
            pairs = torch.from_numpy(np.take(_pairs(), index))
            result[matrix, at] = pairs.view(torch.bfloat16).reshape(end - begin, -1)
    return result.reshape(*lead, rows, result.shape[-1])


@cache
def e4m3_values() -> Tensor:
    """Returns the number of each byte of float8_e4m3fn, float32 [256]."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@cache
def _pairs() -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Returns a table of the two bfloat16 numbers of each byte at each scale, as one int32 at 256 x scale + byte."""
    import torch

    numbers = torch.tensor(E2M1_NUMBERS)
    byte = torch.arange(256)
    both = torch.stack([numbers[byte & 0xF], numbers[byte >> 4]], dim=1)
    powers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    return (powers.view(-1, 1, 1) * both).to(torch.bfloat16).view(torch.int32).flatten().numpy()
