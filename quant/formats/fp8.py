"""Dequantizes FP8 weights with a scale for each block, row or tensor (DeepSeek, Qwen, MiniMax, GLM).

A weight is its float8_e4m3fn number times the scale of its block, in float32, rounded once to bfloat16. Blocks start at
the first row and column, so the last ones may be smaller. DeepSeek's scale names end in `_inv`, but weights are still
multiplied by these scales.
Source: DeepSeek-V3 `inference/kernel.py`, `weight_dequant`; compressed-tensors `_process_block`, `_dequantize`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Step
from ckptkit.core.specs import TensorSpec
from ckptkit.storage.buffers import ON_THE_WAY, row_cuts
from quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV, SCALE
from quant.formats.release import DAMAGED, Release
from quant.formats.scheme import SCALE_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

_NAN = 0x7F  # NaN without its sign bit
_MAX_VALUE = 448.0
_PRODUCTS, _ROWS = 1 << 14, 1 << 8  # products and rows of weights worked on at a time: they stay in the cache
_FMTS = (None, "e4m3", "float8_e4m3fn")
_SCALE_FMTS = (None, "float", "ue8m0")


@dataclass(frozen=True)
class Fp8:
    """One variant of FP8."""

    block: tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them
    scales: tuple[str, ...]  # possible endings of the scale's name
    exponents: bool = False  # uint8 scales are accepted, as the exponents that float8_e8m0fnu stores
    unused: tuple[str, ...] = ()  # see `Format`

    @cached_property
    def words(self) -> str:
        """The format in a few words."""
        rows, columns = self.block
        each = "tensor" if rows is None else "row" if columns is None else f"block of {rows} x {columns}"
        return f"FP8 (float8_e4m3fn, one scale for each {each})"

    @property
    def parts(self) -> tuple[str, ...]:
        """Endings that only scales have. `_scale` is not one: plain parameters may end in it too."""
        return (FP8_SCALE_INV, SCALE)

    def steps(self, release: Release) -> Iterator[Step]:
        """Yields a step for every float8 tensor, which turns the weight and its scale into bfloat16."""
        for spec in release.specs.values():
            if spec.dtype == "float8_e4m3fn":
                yield self._step(release, spec)

    def _step(self, release: Release, spec: TensorSpec) -> Step:
        if len(spec.shape) < 2:
            raise release.refused(
                spec.name, "is FP8 and not a matrix", "no release quantizes vectors: compare the shard with the release"
            )
        names = [spec.name + ending for ending in self.scales]
        scale = release.require(next((name for name in names if name in release.specs), names[0]), spec.name)
        block = self.block[0] or spec.shape[-2], self.block[1] or spec.shape[-1]
        grid = (*spec.shape[:-2], -(-spec.shape[-2] // block[0]), -(-spec.shape[-1] // block[1]))
        for_tensor = self.block == (None, None) and scale.shape in ((), (1,))
        release.check(scale.name, scale.shape if for_tensor else grid, self._dtypes, spec, self.words)

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            import torch

            weight, scales = tensors
            factors = _as_float(scales).expand(grid) if for_tensor else _as_float(scales)
            release.check_finite(scale.name, (factors * _MAX_VALUE).to(torch.bfloat16))
            if _has_nan(weight):
                raise release.refused(spec.name, "holds NaN, which some quantizers make of a block of zeros", DAMAGED)
            return [scaled(weight, factors, block)]

        return Step((spec.name, scale.name), (TensorSpec(spec.name, spec.shape, "bfloat16"),), run, "dequantize FP8")

    @cached_property
    def _dtypes(self) -> tuple[str, ...]:
        return (*SCALE_DTYPES, "float8_e8m0fnu", *(["uint8"] if self.exponents else []))


def fp8_format(content: Mapping[str, Any]) -> Fp8:
    """Returns the format of a quantization_config with quant_method "fp8". Raises CkptkitError for unknown values."""
    block, scale_fmt = content.get("weight_block_size"), content.get("scale_fmt")
    for key, value, known in (("fmt", content.get("fmt"), _FMTS), ("scale_fmt", scale_fmt, _SCALE_FMTS)):
        if value not in known:
            raise CkptkitError(
                f"config.json: FP8 with {key} {value!r} is not supported",
                f"known: {', '.join(filter(None, known))}",
                code="unsupported",
            )
    if block is not None and not (
        isinstance(block, (list, tuple)) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise CkptkitError(
            f"config.json: weight_block_size is {block!r}, not two positive numbers",
            "restore config.json from the release",
        )
    static = content.get("activation_scheme") == "static"
    size = (None, None) if block is None else (block[0], block[1])
    return Fp8(
        size, (FP8_SCALE_INV, FP8_SCALE), scale_fmt == "ue8m0", (".input_scale", ".activation_scale") if static else ()
    )


@cache
def _values() -> Tensor:
    """Returns the number that each byte stands for, float32 [256]."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _has_nan(weight: Tensor) -> bool:
    import torch

    codes = weight.view(torch.uint8).reshape(-1).numpy()
    return any(int((codes[begin:end] & _NAN).max()) == _NAN for begin, end in row_cuts(len(codes), 1, ON_THE_WAY))


def _as_float(scales: Tensor) -> Tensor:
    import torch

    return (scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales).float()


def scaled(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiplies weights by the scales of their blocks.

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
    for matrix, factors in enumerate(scales.reshape(-1, down, across)):
        for start in range(0, down, several):
            products = (
                (factors[start : start + several].unsqueeze(-1) * _values())
                .to(torch.bfloat16)
                .view(torch.int16)
                .flatten()
                .numpy()
            )
            first, last = start * height, min((start + several) * height, rows)
            for begin, end in row_cuts(last - first, places.itemsize * columns, ON_THE_WAY):
                at = slice(first + begin, first + end)
                np.take(
                    products,
                    codes[matrix, at] + (places[begin:end] if several > 1 else places),
                    out=found[matrix, at],
                    mode="clip",
                )
    return result


def codes_and_scales(weight: Tensor, scales: Tensor, block: tuple[int | None, int | None]) -> tuple[Tensor, Tensor]:
    """The number that each weight stores, and the scale that it is multiplied by; both float32 [..., rows, columns].

    `weight`: float8_e4m3fn [..., rows, columns]. `scales`: one for each `block`, or for the tensor, as `Fp8` has them.
    """
    factors = _as_float(scales)
    if block == (None, None) and factors.dim() < weight.dim():
        return weight.float(), factors.reshape(1).expand(weight.shape)
    rows, columns = weight.shape[-2:]
    down = factors.repeat_interleave(block[0] or rows, -2)[..., :rows, :]
    return weight.float(), down.repeat_interleave(block[1] or columns, -1)[..., :columns]
