"""The CUDA kernel accepts and refuses what the CPU does, and writes the bytes that the formulas give there."""

import filecmp

import pytest
import torch
from support import models

from ckptkit.app import api
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.grids import quantize
from ckptkit.quant.formats.packing import Packed, pack, pack_zero_point
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.kernels.dispatch import quantize_pack

pytestmark = [pytest.mark.timeout(600)]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCHEMES = [
    *(QuantScheme(group, grid) for group in (32, 64, 128, None) for grid in ("qmax7", "minmax")),
    *(QuantScheme(group, "minmax", symmetric=False) for group in (32, 128, None)),
    *(
        QuantScheme(64, "minmax", symmetric=symmetric, scale_dtype=dtype)
        for symmetric in (True, False)
        for dtype in (torch.float32, torch.bfloat16)
    ),
    QuantScheme(32, "qmax7", scale_dtype=torch.float32),
    QuantScheme(32, "minmax", search="mse"),
]


def name_of(value):
    if isinstance(value, QuantScheme):
        stored = str(value.scale_dtype or "own").removeprefix("torch.")
        return f"{value.grid}-{value.group_size}-{'sym' if value.symmetric else 'asym'}-{value.search}-{stored}"
    return str(value).removeprefix("torch.")


def on_the_cpu(weight, scheme):
    codes, scale, zero_point = quantize(weight, scheme)
    return Packed(pack(codes), scale, None if zero_point is None else pack_zero_point(zero_point))


def assert_same(weights, scheme):
    made = quantize_pack([weight.cuda() for weight in weights], scheme, [f"w{index}" for index in range(len(weights))])
    for index, (weight, packed) in enumerate(zip(weights, made, strict=True)):
        for part, actual, expected in zip(Packed._fields, packed, on_the_cpu(weight, scheme), strict=True):
            assert (actual is None) == (expected is None), (index, part)
            if expected is None or actual is None:
                continue
            assert actual.device.type == "cuda"
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), (index, part)
            different = int((actual.cpu() != expected).sum())
            assert not different, f"matrix {index}: {different} of {expected.numel()} values of {part} differ"


def odd_groups(dtype):
    """Zeros, negative zeros, constants, one-sided, tiny, subnormal and huge values, a row each, 256 columns."""
    info = torch.finfo(dtype)
    noise = torch.rand(256, generator=torch.Generator().manual_seed(3)) - 0.5
    big = min(info.max, 1e38)
    rows = [
        torch.zeros(256),
        -torch.zeros(256),
        torch.full((256,), 0.3),
        torch.full((256,), -0.3),
        noise.abs(),
        -noise.abs(),
    ]
    rows += [noise * scale for scale in (1e-4, 1e-5, info.tiny, info.tiny / 8, info.smallest_normal * 20, big / 100)]
    rows += [torch.full((256,), info.smallest_normal), noise.sign() * big / 8]
    return torch.stack(rows).to(dtype)


def ties(dtype):
    """Weights halfway between two codes, or one step of the dtype off: absmax is 7 s or 7.5 s, the rest (k+1/2) s."""
    scale = torch.tensor([1.0, 0.75, 1.3, 0.0173, 3.1e-4]).to(dtype).float()[:, None]
    halves = torch.arange(-7, 7).repeat(9)[:123] + 0.5
    rows = (
        torch.cat(
            [torch.full((1,), 7.0), halves, torch.full((1,), 3.0), halves, torch.full((1,), 7.5), torch.zeros(7)]
        )[None]
        * scale
    )
    near = rows.to(dtype)
    up, down = (torch.nextafter(near.float(), torch.full_like(rows, end)).to(dtype) for end in (torch.inf, -torch.inf))
    return torch.cat([near, up, down])


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_same_bytes_as_on_the_cpu(dtype, scheme):
    draw = torch.Generator().manual_seed(5)
    shapes = [(64, 384), (13, 128), (64, 384), (1, 1152), (200, 7168)]
    weights = [(torch.randn(shape, generator=draw) * 10.0**-index).to(dtype) for index, shape in enumerate(shapes)]
    assert_same([*weights, odd_groups(dtype), ties(dtype)], scheme)


@pytest.mark.parametrize(
    "scheme",
    [QuantScheme(32, "qmax7"), QuantScheme(128, "minmax"), QuantScheme(32, "minmax", symmetric=False)],
    ids=name_of,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_same_bytes_over_many_quotients(dtype, scheme):
    draw = torch.Generator().manual_seed(6)
    assert_same([(torch.randn((4096, 4096), generator=draw) * torch.rand((4096, 1), generator=draw)).to(dtype)], scheme)


def test_the_formulas_give_the_same_on_the_gpu():
    weight = torch.randn((256, 512), generator=torch.Generator().manual_seed(7))
    for dtype in DTYPES:
        for scheme in SCHEMES:
            for actual, expected in zip(
                quantize(weight.to(dtype).cuda(), scheme), quantize(weight.to(dtype), scheme), strict=True
            ):
                assert (actual is None) == (expected is None)
                assert actual is None or expected is None or torch.equal(actual.cpu(), expected), (dtype, scheme)


def test_views_that_are_not_aligned_or_contiguous():
    scheme = QuantScheme(32, "qmax7")
    storage = torch.randn(64 * 256 + 1, generator=torch.Generator().manual_seed(8)).bfloat16().cuda()
    views = [storage[1:].view(64, 256), storage[:-1].view(256, 64).T, storage[:-1].view(64, 256)[:, :128]]
    for view, packed in zip(views, quantize_pack(views, scheme, ["shifted", "transposed", "narrow"]), strict=True):
        expected = on_the_cpu(view.cpu(), scheme)
        assert torch.equal(packed.words.cpu(), expected.words)
        assert torch.equal(packed.scale.cpu(), expected.scale)


@pytest.mark.parametrize("shape", [(0, 128), (4, 0)], ids=str)
def test_nothing_to_quantize(shape):
    for scheme in (QuantScheme(32, "qmax7"), QuantScheme(None, "qmax7"), QuantScheme(None, "minmax", symmetric=False)):
        assert_same([torch.zeros(shape, dtype=torch.bfloat16)], scheme)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(
    "scheme",
    [QuantScheme(32, "qmax7"), QuantScheme(None, "minmax"), QuantScheme(128, "minmax", symmetric=False)],
    ids=name_of,
)
def test_refuses_what_is_not_finite(scheme, value):
    weights = [torch.ones((16, 256), dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    weights[1][15, 255] = value
    with pytest.raises(CkptkitError, match="the second.*NaN"):
        quantize_pack(weights, scheme, ["the first", "the second", "the third"])


def test_refuses_scales_that_overflow():
    weight = torch.full((8, 128), 1e30, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(CkptkitError, match="float16"):
        quantize_pack([weight], QuantScheme(32, "minmax", scale_dtype=torch.float16), ["w"])


def test_a_layer_takes_few_launches():
    """As many matrices as Kimi K2 has in a layer: 384 experts of three."""
    experts = [
        torch.randn(shape, device="cuda").bfloat16() for _ in range(384) for shape in ((64, 128), (64, 128), (128, 64))
    ]
    names = [str(index) for index in range(len(experts))]
    quantize_pack(experts, QuantScheme(32, "qmax7"), names)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        quantize_pack(experts, QuantScheme(32, "qmax7"), names)
        torch.cuda.synchronize()
    launches = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in launches if not name.startswith("Mem")]
    assert 2 <= len(kernels) <= 10, kernels


def test_a_checkpoint_has_the_same_bytes(tmp_path):
    models.save("qwen3_moe", tmp_path / "source")
    for device in ("cpu", "cuda"):
        api.quantize(tmp_path / "source", tmp_path / device, QuantScheme(32, "qmax7"), device=device, workers=4)
    files = sorted(path.name for path in (tmp_path / "cpu").glob("*.safetensors"))
    assert files
    assert filecmp.cmpfiles(tmp_path / "cpu", tmp_path / "cuda", files, shallow=False) == (files, [], [])
