"""Packed INT4 weights in the layout of the Marlin kernels of SGLang and vLLM, computed from the format.

A tile is 16 input rows by 64 output columns; each of 32 GPU threads owns 8 values in each of the tile's four 16-column
blocks (IST Austria's Marlin; vLLM and SGLang `gptq_marlin_repack`). Zero points follow the order of the threads, then
that of the nibbles in the kernel (SGLang `marlin_zero_points`); those of experts start in AWQ's order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from ckptkit.quant.formats.part_names import WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_ZERO_POINT
from ckptkit.verify.witnesses.loading.job import Observation
from ckptkit.verify.witnesses.loading.layouts.layout import Compare, Layout, own_parameters, unlike

_TILE_ROWS, _TILE_COLUMNS, _BLOCK, _WORD = 16, 64, 16, 8
_NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_GATE_AND_UP = "w13_"
_MATRICES = ("", _GATE_AND_UP, "w2_")
_REPACKED = tuple(matrix + part for matrix in _MATRICES for part in (WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_ZERO_POINT))
_CHANNEL_ORDER = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]  # of 32 columns
_BIASES = tuple(f"{matrix}bias" for matrix in _MATRICES)


def _tile_order() -> Tensor:
    """The number of the value at each of a tile's 1024 places, counted block by block and row by row."""
    order = []
    for thread in range(32):
        column, row = thread // 4, 2 * (thread % 4)
        own = [_BLOCK * (row + down) + column + right for right in (0, 8) for down in (0, 1, 8, 9)]
        order += [[block * _TILE_ROWS * _BLOCK + own[nibble] for nibble in _NIBBLE_ORDER] for block in range(4)]
    return torch.tensor(order).flatten()


def marlin_weight(packed: Tensor) -> Tensor:
    """Words [inputs / 8, outputs], eight input rows each, low bits first -> words [inputs / 16, 2 x outputs] int32."""
    shifts = 4 * torch.arange(_WORD, device=packed.device)
    values = ((packed.long().unsqueeze(1) >> shifts[None, :, None]) & 15).reshape(-1, packed.shape[1])
    inputs, outputs = values.shape
    tiles = values.reshape(inputs // _TILE_ROWS, _TILE_ROWS, outputs // _BLOCK, _BLOCK).transpose(1, 2)
    ordered = tiles.reshape(-1, _TILE_ROWS * _TILE_COLUMNS)[:, _tile_order().to(packed.device)]
    return (ordered.reshape(inputs // _TILE_ROWS, -1, _WORD) << shifts).sum(-1).to(torch.int32)


def marlin_scales(scales: Tensor) -> tuple[Tensor, ...]:
    """Scales [groups, outputs] with 8 x 8 columns transposed; a single group may also be in channel-wise order."""
    transposed = scales.reshape(-1, 8, 8).transpose(1, 2).reshape(scales.shape)
    return (transposed,) if scales.shape[0] > 1 else (transposed, _by_channel(scales))


def marlin_experts(loaded: Tensor) -> Tensor:
    """INT4 words or scales as stored [experts, outputs, inputs / 8 or groups] -> repacked, if they fill the tiles."""
    is_packed = loaded.dtype == torch.int32
    if loaded.dim() < 3 or loaded.shape[1] % _TILE_COLUMNS or (is_packed and loaded.shape[2] * _WORD % _TILE_ROWS):
        return loaded
    return torch.stack([marlin_weight(one.t()) if is_packed else marlin_scales(one.t())[0] for one in loaded])


def marlin_zero_points(packed: Tensor, *, awq: bool) -> Tensor:
    """Words [groups, outputs / 8] int32, eight output rows each, in row or AWQ order -> the same in Marlin's order."""
    shifts = 4 * torch.arange(_WORD, device=packed.device)
    codes = (packed.long().unsqueeze(-1) >> shifts) & 15
    if awq:
        codes = codes[..., torch.tensor(_NIBBLE_ORDER, device=packed.device).argsort()]
    threads = codes.reshape(-1, 8, 8).transpose(1, 2).reshape(codes.shape)
    return (threads[..., list(_NIBBLE_ORDER)] << shifts).sum(-1).to(torch.int32)


def _by_channel(scales: Tensor) -> Tensor:
    """Channel-wise scales or a bias [..., outputs] in the order of Marlin's threads."""
    return scales.reshape(-1, 32)[:, _CHANNEL_ORDER].reshape(scales.shape)


def packed_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in own_parameters(module).items() if name in _REPACKED}


def marlin(*, awq_experts: bool = False, bias: bool = False) -> Layout:
    """Packed INT4 for Marlin's kernels; sizes may have been padded with zeros to their tiles.

    `awq_experts`: the zero points of experts are stored in AWQ's order. `bias`: it is permuted too.
    """

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        own = own_parameters(module)
        # Transposed to [inputs / 8, outputs], [groups, outputs] or [groups, outputs / 8], as experts are stored.
        packed = packed_parameters(module).items()
        before = {name: (tensor.t() if tensor.dim() == 2 else tensor).clone() for name, tensor in packed}
        before |= {name: own[name].clone() for name in _BIASES if bias and name in own}

        def compare() -> Iterator[Observation]:
            for name, loaded in before.items():
                is_awq = awq_experts and name != WEIGHT_ZERO_POINT
                wanted = _wanted(name, loaded, getattr(module, name, None), is_awq)
                yield from unlike(module, name, wanted)

        return before, compare

    return expect


def _wanted(name: str, loaded: Tensor, actual: Tensor | None, is_awq: bool) -> list[Tensor]:
    """The values that a parameter may hold: the loaded ones, padded to its size."""
    is_bias, is_packed = name in _BIASES, name.endswith(WEIGHT_PACKED)
    matrices = loaded.unsqueeze(-2) if is_bias else loaded
    repacked = actual.unsqueeze(-2) if is_bias and actual is not None else actual
    tile = _TILE_COLUMNS // _WORD if name.endswith(WEIGHT_ZERO_POINT) else _TILE_COLUMNS
    rows, columns = _sizes(matrices, repacked, (2, 0.5) if is_packed else (1, 1), (2 if is_packed else 1, tile))
    padded = zero_padded(matrices, rows, columns, 2 if name.startswith(_GATE_AND_UP) else 1)
    if is_bias:
        return [_by_channel(padded.squeeze(-2))]
    if padded.dim() == 2:
        return [*_orders(name, padded, is_awq)]
    return [torch.stack(order) for order in zip(*[_orders(name, matrix, is_awq) for matrix in padded], strict=True)]


def _sizes(
    loaded: Tensor, repacked: Tensor | None, factors: tuple[float, float], units: tuple[int, int]
) -> tuple[int, int]:
    """Rows and columns, in multiples of `units`: the repacked sizes times `factors`, if none of these is smaller."""
    sizes = loaded.shape[-2:]
    if repacked is not None and repacked.dim() == loaded.dim():
        padded = [int(size * factor) for size, factor in zip(repacked.shape[-2:], factors, strict=True)]
        if all(wide >= size for wide, size in zip(padded, sizes, strict=True)):
            sizes = torch.Size(padded)
    rows, columns = (-(-size // unit) * unit for size, unit in zip(sizes, units, strict=True))
    return rows, columns


def zero_padded(tensor: Tensor, rows: int, columns: int, halves: int = 1) -> Tensor:
    """[..., rows, columns] with zeros below and to the right, padded separately in each of `halves` of the columns."""
    wider = columns // halves - tensor.shape[-1] // halves
    parts = [nn.functional.pad(part, (0, wider, 0, rows - part.shape[-2])) for part in tensor.chunk(halves, -1)]
    return torch.cat(parts, -1)


def _orders(name: str, matrix: Tensor, is_awq: bool) -> tuple[Tensor, ...]:
    if name.endswith(WEIGHT_PACKED):
        return (marlin_weight(matrix),)
    return (marlin_zero_points(matrix, awq=is_awq),) if name.endswith(WEIGHT_ZERO_POINT) else marlin_scales(matrix)
