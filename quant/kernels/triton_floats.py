"""Quantizes weights to float8_e4m3fn on a GPU, hundreds of matrices a launch, in one read and one write.

The bytes are those of `quant.kernels.floats` on the CPU, by the formulas of `quant.kernels.float_roundings`: every
division is correctly rounded. GPUs before compute capability 8.9 have no instruction for float8_e4m3fn; there a code
is computed by integer arithmetic, as in `quant.kernels.floats_cpu`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats.grids import not_finite
from quant.kernels.float_roundings import ROUNDINGS, Fp8Weight, blocks_of, scale_dtype, tiny
from quant.kernels.triton_launch import TYPES, Launcher, run_launches, working_on

_TILE = 8192  # weights a program takes, unless a block or a row is larger
_WEIGHTS_PER_WARP = 2048
_MAX_WIDTH = 65536  # of a row with one scale, which a program holds in registers


@triton.jit
def _scales(largest, ROUNDING: tl.constexpr, WEIGHT: tl.constexpr, TINY: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns scales as stored, and the float32 that weights are multiplied by, or divided by. `largest`: float32."""
    if ROUNDING == "slime":
        scale = tl.div_rn(tl.maximum(largest, TINY), 448.0)
        factor = scale
    elif ROUNDING == "slime-cuda":
        scale = tl.maximum(largest, TINY) * (1 / 448)
        factor = scale
    elif ROUNDING == "online":
        scale = tl.maximum(largest, 1e-10) * (1 / 448)
        factor = tl.div_rn(1.0, scale)
    elif ROUNDING == "transformers":
        factor = tl.div_rn(1.0, largest) * 448.0
        factor = tl.where(factor == float("inf"), 1.0, factor)
        scale = tl.div_rn(1.0, factor)
    elif ROUNDING == "deepgemm":
        above = tl.div_rn(tl.maximum(largest, 1e-4), 448.0).to(tl.int32, bitcast=True) + 0x007FFFFF
        scale = (above & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.div_rn(1.0, scale)
    elif ROUNDING == "compressed-tensors":
        scale = tl.div_rn(largest, 448.0).to(WEIGHT).to(tl.float32)
        scale = tl.where(scale == 0, EPS, scale)
        factor = scale
    else:
        tl.static_assert(ROUNDING == "modelopt")
        bits = (largest * (1 / 448)).to(tl.int32, bitcast=True)
        scale = (tl.where(bits <= 0x00400000, 0, bits) + 0x007FFFFF) >> 23
        factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    return scale, factor


@triton.jit
def _code(x):  # type: ignore[no-untyped-def]
    """The bits of float32 rounded half to even to float8_e4m3fn, at most 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 codes are multiples of 2^-9, which adding 2^14 leaves in the lowest bits.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return (tl.where(magnitude >= 0x3C800000, normal, small) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scaled(  # type: ignore[no-untyped-def]
    table, codes, scales, bad, rows, columns,
    WEIGHT: tl.constexpr, ROUNDING: tl.constexpr, DIVIDES: tl.constexpr, IN_WEIGHT_DTYPE: tl.constexpr,
    TINY: tl.constexpr, EPS: tl.constexpr, NATIVE: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantizes ROWS x WIDTH weights (first grid axis) of one matrix (second axis). They share a scale, or each row."""
    matrix = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(columns, WIDTH)
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    row = down * ROWS + tl.arange(0, ROWS)[:, None]
    column = right * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < columns)
    place = row.to(tl.int64) * columns + column
    weight = tl.multiple_of(tl.load(table + matrix).to(tl.pointer_type(WEIGHT)), 16)
    x = tl.load(weight + place, mask=inside, other=0).to(tl.float32)
    # As integers magnitudes order as their floats do, and whatever is not finite lies beyond infinity's bits.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if PER_ROW:
        largest = tl.max(magnitude, 1, keep_dims=True)
        line, lines = row, rows
    else:
        largest = tl.max(magnitude)
        line, lines = down, tl.cdiv(rows, ROWS)
    scale, factor = _scales(largest.to(tl.float32, bitcast=True), ROUNDING, WEIGHT, TINY, EPS)
    tl.store(scales + (matrix * lines + line) * across + right, scale, mask=line < lines)
    tl.store(bad + matrix + line * 0, 1, mask=largest >= 0x7F800000)
    x = tl.div_rn(x, factor) if DIVIDES else x * factor
    if IN_WEIGHT_DTYPE:
        x = x.to(WEIGHT).to(tl.float32)
    code = tl.clamp(x, -448.0, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else _code(x)
    tl.store(codes.to(tl.pointer_type(tl.uint8), bitcast=True) + matrix * rows * columns + place, code, mask=inside)


def has_kernel(weight: Tensor, block: tuple[int, int | None]) -> bool:
    """Whether `fp8_launcher` takes this matrix: on a GPU, not empty, of a block it knows."""
    fits = block in ((128, 128), (1, 32)) or (block == (1, None) and weight.shape[1] <= _MAX_WIDTH)
    return weight.is_cuda and weight.numel() > 0 and fits


def fp8_launcher(weight: Tensor, block: tuple[int, int | None], rounding: str) -> Launcher:
    """Returns the launcher for matrices like `weight`, as `has_kernel` takes them.

    Its outputs are codes and scales.
    """
    (rows, columns), dtype, formula = weight.shape, weight.dtype, ROUNDINGS[rounding]
    height, width = block[0], block[1] or triton.next_power_of_2(columns)
    if height == 1 and columns % width == 0:
        rows, columns = weight.numel() // width, width  # groups follow one another, whatever row they are of
    height = max(height, _TILE // width) if height == 1 else height
    return Launcher(
        scaled,
        triton.cdiv(rows, height) * triton.cdiv(columns, width),
        {
            "rows": rows,
            "columns": columns,
            "WEIGHT": TYPES[dtype],
            "ROUNDING": rounding,
            "DIVIDES": formula.divides,
            "IN_WEIGHT_DTYPE": formula.in_weight_dtype,
            "TINY": tiny(dtype),
            "EPS": torch.finfo(dtype).eps,
            "NATIVE": _converts(weight.device),
            "PER_ROW": block[0] == 1,
            "ROWS": height,
            "WIDTH": width,
            "num_warps": min(max(height * width // _WEIGHTS_PER_WARP, 1), 32),
        },
    )


def _converts(device: torch.device) -> bool:
    """Whether a GPU has an instruction that converts to float8_e4m3fn."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def quantize_fp8_cuda(
    weights: Sequence[Tensor], block: tuple[int, int | None], rounding: str, names: Sequence[str]
) -> list[Fp8Weight]:
    """As `quant.kernels.floats.quantize_fp8` for matrices of one GPU that have a kernel; waits once, at the end."""

    def launch(members: Sequence[int], bad: Tensor) -> list[Fp8Weight]:
        some = [weights[index].detach().contiguous() for index in members]
        shape, device = some[0].shape, some[0].device
        codes = torch.empty((len(some), *shape), dtype=torch.float8_e4m3fn, device=device)
        stored = scale_dtype(rounding, some[0].dtype)
        scales = torch.empty((len(some), *blocks_of(shape, block)), dtype=stored, device=device)
        with working_on(device):
            fp8_launcher(some[0], block, rounding).start(some, [codes, scales], bad)
        return list(map(Fp8Weight, codes.unbind(), scales.unbind()))

    return run_launches(
        weights, launch, lambda index, made: not_finite(weights[index], made.scales.dtype, names[index])
    )
