"""FP8 on a GPU: the bytes of the CPU, and those of the Triton kernel by which trainers update an engine."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
from support.quant_weights import DTYPES, hard_weights
from torch import Tensor
from triton import language as tl

from quant.kernels.float_roundings import ROUNDINGS
from quant.kernels.floats import quantize_fp8

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(600)]
BLOCKS = [(128, 128), (1, None), (1, 32)]


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have one dtype and the same bits."""
    left, right = left.cpu(), right.cpu()
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@triton.jit
def _cast_block(x_at, codes_at, scales_at, rows, columns, floor, top, height: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The operations of slime `fp8_kernel.py`, `_blockwise_cast_to_fp8_triton`; `floor` and `top` are not constants."""
    down, across = tl.program_id(0), tl.program_id(1)
    row = (down * height + tl.arange(0, height))[:, None]
    column = (across * width + tl.arange(0, width))[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_at + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)), floor) / top
    codes = tl.clamp(x * (1.0 / scale), -top, top).to(tl.float8e4nv)
    tl.store(codes_at + row * columns + column, codes, mask=inside)
    tl.store(scales_at + down * tl.num_programs(1) + across, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hard = torch.cat([hard_weights(dtype, 300)[:-1] for _ in range(5)])
    hard[:128, :128] = 0
    wide = (torch.randn(1000, 4100) * 0.02).to(dtype)
    for weight, rounding, block in product((hard, wide), ROUNDINGS, BLOCKS):
        found, wanted = quantize_fp8(weight.cuda(), block, rounding, "a"), quantize_fp8(weight, block, rounding, "a")
        assert found.codes.is_cuda
        assert same(found.codes, wanted.codes), (rounding, block)
        assert same(found.scales, wanted.scales), (rounding, block)


@pytest.mark.parametrize("shape", [(2048, 4096), (1000, 300)])
def test_online_is_what_the_triton_kernel_of_trainers_gives(shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    weight = (torch.randn(shape) * 0.02).bfloat16().cuda()
    weight[:128, :128] = 0
    grid = tuple(-(-side // 128) for side in shape)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(grid, dtype=torch.float32, device="cuda")
    _cast_block[grid](weight, codes, scales, *shape, 1e-10, 448.0, height=128, width=128, num_warps=8)
    found = quantize_fp8(weight, (128, 128), "online", "a")
    assert same(found.scales, scales)
    assert same(found.codes, codes)


def test_slime_cuda_is_what_slimes_tool_computes_on_a_gpu() -> None:
    torch.manual_seed(3)
    weight = (torch.randn(1024, 2048) * 0.02).bfloat16().cuda()
    tiles = weight.view(8, 128, 16, 128)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12).float() / 448.0
    codes = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(1024, 2048)
    found = quantize_fp8(weight, (128, 128), "slime-cuda", "a")
    assert same(found.scales, scale.view(8, 16))
    assert same(found.codes, codes)
