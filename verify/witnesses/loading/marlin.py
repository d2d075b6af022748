"""Packed INT4 weights in the layout of the Marlin kernels of SGLang and vLLM, computed from what was loaded.

Running an engine's repacking kernel a second time would prove nothing, so this computes the layout from the format. A
tile is 16 input rows by 64 output columns; each of 32 GPU threads owns 8 values in each of the tile's four 16-column
blocks (IST Austria's Marlin; vLLM and SGLang `gptq_marlin_repack`). Zero points are in the order of the threads too,
then in that of the nibbles which the kernel takes apart (SGLang `marlin_zero_points`); those of experts start in AWQ's
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quant.formats.part_names import WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SCALE_INV, WEIGHT_ZERO_POINT
from verify.witnesses.loading.bits import difference
from verify.witnesses.loading.job import Observation

_TILE_ROWS, _TILE_COLUMNS, _BLOCK, _WORD = 16, 64, 16, 8
_NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_REPACKED = tuple(
    matrix + part for matrix in ("", "w13_", "w2_") for part in (WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_ZERO_POINT)
)


def _tile_order() -> Tensor:
    """For each of a tile's 1024 places, the number of its value, counted block by block and row by row."""
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
    """Scales [groups, outputs] in the order of Marlin's threads: 8 x 8 columns transposed.

    A single group may also be in the order of channel-wise scales.
    """
    transposed = scales.reshape(-1, 8, 8).transpose(1, 2).reshape(scales.shape)
    if scales.shape[0] > 1:
        return (transposed,)
    order = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)], device=scales.device)
    return (transposed, scales.reshape(-1, 32)[:, order].reshape(scales.shape))


def marlin_zero_points(packed: Tensor, *, awq: bool) -> Tensor:
    """Words [groups, outputs / 8] int32, eight output rows each, in row or AWQ order -> the same in Marlin's order."""
    shifts = 4 * torch.arange(_WORD, device=packed.device)
    codes = (packed.long().unsqueeze(-1) >> shifts) & 15
    if awq:
        codes = codes[..., torch.tensor(_NIBBLE_ORDER, device=packed.device).argsort()]
    threads = codes.reshape(-1, 8, 8).transpose(1, 2).reshape(codes.shape)
    return (threads[..., list(_NIBBLE_ORDER)] << shifts).sum(-1).to(torch.int32)


def repacked_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """A module's own packed weights, scales and zero points, by their names in it."""
    return {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False) if name in _REPACKED}


def free_to_change(module: torch.nn.Module, known: bool) -> list[str]:
    """The parameters of a layer that its kernel may rewrite in a way not predicted here.

    Those of a layout that is not `known`, and FP8 blocks: kept as loaded on Hopper, requantized or repacked on others.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)]
    return names if not known or any(name.endswith(WEIGHT_SCALE_INV) for name in names) else []


def before_repacking(module: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of what will be repacked, inputs first: [inputs / 8, outputs], [groups, outputs], [groups, outputs / 8].

    Those of experts have one such matrix for each expert.
    """
    found = repacked_parameters(module)
    return {name: (tensor.t() if tensor.dim() == 2 else tensor).clone() for name, tensor in found.items()}


def after_repacking(module: torch.nn.Module, prefix: str, before: Mapping[str, Tensor]) -> Iterator[Observation]:
    """Every weight, scale and zero point of a module that is not what Marlin needs."""
    for name, old in before.items():
        new = getattr(module, name).detach()
        experts = range(old.shape[0]) if old.dim() == 3 else [None]
        for expert in experts:
            was, now = (old, new) if expert is None else (old[expert], new[expert])
            found = [difference(now, one) for one in _wanted(name, was)]
            if None not in found:
                where = f"{prefix}.{name}" if expert is None else f"{prefix}.{name}[{expert}]"
                yield Observation(where, where, str(found[0]))


def _wanted(name: str, was: Tensor) -> tuple[Tensor, ...]:
    if name.endswith(WEIGHT_PACKED):
        return (marlin_weight(was),)
    return (
        (marlin_zero_points(was, awq=name != WEIGHT_ZERO_POINT),)
        if name.endswith(WEIGHT_ZERO_POINT)
        else marlin_scales(was)
    )
