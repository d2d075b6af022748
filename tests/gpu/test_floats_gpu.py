"""FP8 on a GPU: the bytes of the CPU, and those of the Triton kernel by which trainers update an engine."""

from itertools import product

import pytest
import torch
import triton
from support.quant_weights import DTYPES, hard_weights
from support.triton_floats import OFFERED as ROUNDINGS_OF
from triton import language as tl

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.kernels import triton_kernels
from ckptkit.quant.kernels.float_roundings import ROUNDINGS
from ckptkit.quant.kernels.floats import quantize_fp8, quantize_fp8_matrices, quantize_mxfp4, quantize_nvfp4

pytestmark = [pytest.mark.timeout(600)]
BLOCKS = list(ROUNDINGS_OF)
EIGHT_BIT = [name for name, one in ROUNDINGS.items() if not one.four_bit]
# Each is a kernel that takes Triton a second to compile.
OFFERED = [(block, name) for block, names in ROUNDINGS_OF.items() for name in names]
NAMES = ["first", "second", "third"]


def same(left, right):
    left, right = left.cpu().reshape(-1), right.cpu().reshape(-1)
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@triton.jit
def _cast_block(x_at, codes_at, scales_at, rows, columns, floor, top, height: tl.constexpr, width: tl.constexpr):
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


def assert_same(found, wanted, case):
    assert found.codes.is_cuda, case
    assert found.codes.shape == wanted.codes.shape, case
    assert found.scales.shape == wanted.scales.shape, case
    assert same(found.codes, wanted.codes), case
    assert same(found.scales, wanted.scales), case


def exhaustive(dtype):
    """Every float8_e4m3fn and every tie between two, and their neighbours, at scales that are powers of two."""
    values = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[:-1] + values[1:]) / 2
    near = [ties.to(dtype).nextafter(torch.tensor(end, dtype=dtype)).float() for end in (0.0, 448.0)]
    numbers = torch.cat([values, ties, *near])
    row = torch.cat([numbers, -numbers, torch.zeros(-2 * len(numbers) % 31)]).view(-1, 31)
    row = torch.cat([torch.full((len(row), 1), 448.0), row], 1).flatten()
    return torch.stack([row * 2.0**exponent for exponent in range(-6, 4)]).to(dtype)


@pytest.mark.parametrize(("native", "dtype"), [*((True, dtype) for dtype in DTYPES), (False, torch.bfloat16)], ids=str)
def test_a_gpu_gives_the_bytes_of_the_cpu(dtype, native, monkeypatch):
    """With the GPU's own conversion to float8_e4m3fn, and with the arithmetic that stands for it on older ones."""
    if not native:
        monkeypatch.setattr(triton_kernels, "_converts", lambda device: False)
    torch.manual_seed(1)
    hard = torch.cat([hard_weights(dtype, 300)[:-1] for _ in range(5)])
    hard[:128, :128] = 0
    wide = (torch.randn(1000, 4100) * torch.rand(1000, 1)).to(dtype)
    cases = [(weight, *case) for weight in (wide, exhaustive(dtype)) for case in OFFERED]
    for weight, block, rounding in [*((hard, *case) for case in product(BLOCKS, EIGHT_BIT)), *cases]:
        assert triton_kernels.has_kernel(weight.cuda(), block)
        found, wanted = quantize_fp8(weight.cuda(), block, rounding, "a"), quantize_fp8(weight, block, rounding, "a")
        assert_same(found, wanted, (tuple(weight.shape), rounding, block))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_bits_on_a_gpu_are_those_of_the_cpu(dtype):
    torch.manual_seed(7)
    weights = [hard_weights(dtype, 320), (torch.randn(1000, 4096) * torch.rand(1000, 1)).to(dtype)]
    for weight in weights:
        found = quantize_mxfp4(weight.cuda(), "a")
        assert_same(found, quantize_mxfp4(weight, "a"), "mxfp4")
    for writer, several in product(("modelopt", "compressed-tensors"), (weights, weights[1:])):
        found_all, second = quantize_nvfp4([weight.cuda() for weight in several], writer, NAMES[: len(several)])
        wanted_all, wanted = quantize_nvfp4(several, writer, NAMES[: len(several)])
        assert same(second, wanted), writer
        for found, one in zip(found_all, wanted_all, strict=True):
            assert_same(found, one, writer)


@pytest.mark.parametrize("block", BLOCKS)
def test_several_matrices_have_the_bytes_of_each(block):
    torch.manual_seed(5)
    shapes = [(64, 384), (130, 100), (64, 384), (384, 64), (1, 1), (200, 7168)]
    weights = [(torch.randn(shape) / 50).bfloat16() for shape in shapes]
    names = [str(shape) for shape in shapes]
    made = quantize_fp8_matrices([weight.cuda() for weight in weights], block, "online", names)
    for weight, found, name in zip(weights, made, names, strict=True):
        assert_same(found, quantize_fp8(weight, block, "online", name), name)


def test_views_that_are_not_aligned_or_contiguous_and_what_has_no_kernel():
    storage = (torch.randn(130 * 256 + 1) / 50).bfloat16()
    for name, cut in {
        "shifted": lambda whole: whole[1:].view(130, 256),
        "transposed": lambda whole: whole[:-1].view(130, 256).T,
        "narrow": lambda whole: whole[:-1].view(130, 256)[:, :100],
        "empty": lambda whole: whole.view(-1, 1)[:, :0],
    }.items():
        for block in BLOCKS:
            wanted = quantize_fp8(cut(storage), block, "online", name)
            assert_same(quantize_fp8(cut(storage.cuda()), block, "online", name), wanted, (name, block))
    wide = (torch.randn(2, 70000) / 50).bfloat16()
    assert not triton_kernels.has_kernel(wide.cuda(), (1, None))
    assert_same(
        quantize_fp8(wide.cuda(), (1, None), "slime", "wide"), quantize_fp8(wide, (1, None), "slime", "wide"), ""
    )


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_is_refused_by_name(block, value):
    weights = [torch.ones((130, 160), dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    weights[1][129, 159] = value
    with pytest.raises(CkptkitError, match="second.*NaN"):
        quantize_fp8_matrices(weights, block, "online", NAMES)


def test_plain_torch_on_a_gpu_gives_the_same():
    """It is what runs where there is no kernel."""
    weight = (torch.randn(300, 300) / 50).bfloat16()
    for rounding, block in product(EIGHT_BIT, BLOCKS):
        found = quantize_fp8(weight.cuda(), block, rounding, "a", kernel=False)
        assert_same(found, quantize_fp8(weight, block, rounding, "a"), (rounding, block))


@pytest.mark.parametrize("shape", [(2048, 4096), (1000, 300)])
def test_online_is_what_the_triton_kernel_of_trainers_gives(shape):
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


def test_slime_cuda_is_what_slimes_tool_computes_on_a_gpu():
    torch.manual_seed(3)
    weight = (torch.randn(1024, 2048) * 0.02).bfloat16().cuda()
    tiles = weight.view(8, 128, 16, 128)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12).float() / 448.0
    codes = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(1024, 2048)
    found = quantize_fp8(weight, (128, 128), "slime-cuda", "a")
    assert same(found.scales, scale.view(8, 16))
    assert same(found.codes, codes)
