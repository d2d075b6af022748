"""Dequantizes gpt-oss's MXFP4 weights: fused experts of 4-bit floats, with one power of two as scale for each 32.

`N_blocks` uint8 [experts, rows, groups, 16] holds two E2M1 numbers a byte, the first in the low bits. `N_scales` uint8
[experts, rows, groups] holds exponents, biased by 127. They give `N` bfloat16 [experts, 32 x groups, rows], exactly.
Source: OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1; transposed as in transformers
`convert_moe_packed_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ckptkit.core.plan import Step
from ckptkit.core.specs import TensorSpec
from ckptkit.storage.buffers import ON_THE_WAY, row_cuts
from quant.formats.part_names import MXFP4_BLOCKS, MXFP4_SCALES
from quant.formats.release import DAMAGED, Release

if TYPE_CHECKING:
    from torch import Tensor

_BYTES = 16  # of a group: 32 numbers
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ONES = 0x22  # two codes of the number 1
_SCALE_ONE = 127
_MAX_SCALE = 252  # 6 x 2^125 is the largest product that bfloat16 holds; 255 is NaN


@dataclass(frozen=True)
class Mxfp4:
    """The MXFP4 format; gpt-oss's is the only variant released."""

    words: str = "MXFP4 (4-bit floats, one power of two for each 32 weights)"
    parts: tuple[str, ...] = (MXFP4_BLOCKS, MXFP4_SCALES)
    unused: tuple[str, ...] = ()

    def steps(self, release: Release) -> Iterator[Step]:
        """Yields a step for every pair of blocks and scales."""
        for spec in release.specs.values():
            if spec.name.endswith(MXFP4_BLOCKS):
                yield _step(release, spec)


def _step(release: Release, blocks: TensorSpec) -> Step:
    name = blocks.name.removesuffix(MXFP4_BLOCKS)
    scales = release.require(name + MXFP4_SCALES, blocks.name)
    if len(blocks.shape) != 4 or blocks.shape[-1] != _BYTES or blocks.dtype != "uint8":
        raise release.refused(
            blocks.name,
            f"must be [experts, rows, groups, {_BYTES}] uint8",
            "only gpt-oss's layout of MXFP4 is supported",
        )
    experts, rows, groups, _ = blocks.shape
    release.check(scales.name, (experts, rows, groups), ("uint8",), blocks)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        if bool((tensors[1] > _MAX_SCALE).any()):
            raise release.refused(
                scales.name, f"holds exponents above {_MAX_SCALE}, which give NaN or infinity", DAMAGED
            )
        return [unpacked(*tensors)]

    output = TensorSpec(name, (experts, groups * 2 * _BYTES, rows), "bfloat16")
    return Step((blocks.name, scales.name), (output,), run, "dequantize MXFP4")


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes fused experts to bfloat16 [experts, 32 x groups, rows].

    `blocks`: uint8 [experts, rows, groups, 16]. `scales`: uint8 [experts, rows, groups].
    """
    import torch

    experts, rows, groups, _ = blocks.shape
    result = torch.empty(experts, groups * 2 * _BYTES, rows, dtype=torch.bfloat16)
    for expert in range(experts):
        for begin, end in row_cuts(rows, groups * _BYTES * np.dtype(np.intp).itemsize, ON_THE_WAY):
            index = (scales[expert, begin:end].numpy().astype(np.intp) << 8)[..., None] + blocks[
                expert, begin:end
            ].numpy()
            pairs = torch.from_numpy(np.take(_pairs(), index))
            result[expert, :, begin:end] = pairs.view(torch.bfloat16).reshape(end - begin, -1).T
    return result


def codes_and_scales(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The number that each weight stores, and the scale that it is multiplied by, both as `unpacked` has them."""
    import torch

    return unpacked(blocks, torch.full_like(scales, _SCALE_ONE)), unpacked(torch.full_like(blocks, _ONES), scales)


@cache
def _pairs() -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Returns a table of the two bfloat16 numbers of each byte at each scale, as one int32 at 256 x scale + byte."""
    import torch

    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    byte = torch.arange(256)
    both = torch.stack([values[byte & 0xF], values[byte >> 4]], dim=1)
    factors = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    return (factors.view(-1, 1, 1) * both).to(torch.bfloat16).view(torch.int32).flatten().numpy()
