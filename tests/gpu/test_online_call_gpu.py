"""The online quantizer's public call on a GPU: the same bytes as on the CPU, and errors that name the tensor."""

import pickle
import re

import pytest
import torch
from support.online_model import config, names_of, release, same

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.grids import quantize
from ckptkit.quant.formats.packing import pack
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.kernels.floats import quantize_fp8
from ckptkit.quant.online.quantizer import OnlineQuantizer

pytestmark = [pytest.mark.timeout(600)]

EXPERTS = 50


def layer(dtype=torch.bfloat16, seed=0, wide=(192, 256)):
    """Experts of two shapes of one size, as gate, up and down are, and a router between them."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}
    named = [
        (
            f"model.layers.0.mlp.experts.{expert}.{projection}.weight",
            torch.randn(shape, generator=draw).to(dtype).cuda(),
        )
        for expert in range(EXPERTS)
        for projection, shape in shapes.items()
    ]
    return [
        *named[:7],
        ("model.layers.0.mlp.gate.weight", torch.randn((EXPERTS, 256), generator=draw).cuda()),
        *named[7:],
    ]


def quantizer(named, group=32, grid="qmax7"):
    shape = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    return OnlineQuantizer(config(grid=grid, **shape), names_of([name for name, _ in named]))


def expected(named, group=32, grid="qmax7"):
    found = {}
    for name, tensor in named:
        if ".experts." not in name:
            found[name] = tensor.cpu()
            continue
        codes, scale, _ = quantize(tensor.cpu(), QuantScheme(group, grid), name)
        found |= {f"{name}_packed": pack(codes), f"{name}_scale": scale, f"{name}_shape": torch.tensor(tensor.shape)}
    return found


def on_the_cpu(bucket):
    return {name: tensor.cpu() for name, tensor in bucket}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("grid", ["qmax7", "minmax"])
@pytest.mark.parametrize("group", [32, 64, None])
def test_a_bucket_on_a_gpu_has_the_bytes_of_the_cpu_at_every_call(group, grid, dtype):
    online = quantizer(layer(), group, grid)
    for seed in range(3):
        named = layer(dtype, seed)
        bucket = online.quantize(named)
        wanted = expected(named, group, grid)
        assert [name for name, _ in bucket] == list(wanted)
        assert len(bucket) == len(wanted)
        assert all(tensor.is_cuda and tensor.is_contiguous() for _, tensor in bucket)
        same(on_the_cpu(bucket), wanted)


def test_other_shapes_under_the_same_names_are_worked_out_anew():
    online = quantizer(layer())
    for named in (layer(), layer(wide=(64, 512)), layer(torch.float32), layer()):
        same(on_the_cpu(online.quantize(named)), expected(named))


def test_views_are_read_where_they_lie():
    """Shifted by one weight, so that no load is aligned; and columns of a larger matrix."""
    online = quantizer(layer())
    for number, cut in enumerate(
        (
            lambda whole: whole.view(-1)[1 : 1 + 192 * 256].view(192, 256),
            lambda whole: whole.view(193, 512)[1:, 100:356],
        )
    ):
        whole = torch.randn(193 * 512, generator=torch.Generator().manual_seed(number)).bfloat16().cuda()
        for _ in range(2):
            named = [
                (name, cut(whole) if name.endswith("experts.3.up_proj.weight") else tensor) for name, tensor in layer()
            ]
            same(on_the_cpu(online.quantize(named)), expected(named))


def test_buckets_stay_as_they_are_when_the_next_one_comes():
    online = quantizer(layer())
    sent = [layer(seed=seed) for seed in range(4)]
    buckets = [online.quantize(named) for named in sent]
    for named, bucket in zip(sent, buckets, strict=True):
        wanted = expected(named)
        assert bucket[0][0] == next(iter(wanted))
        for _, tensor in named:
            tensor.zero_()
        same(
            on_the_cpu(pair for pair in bucket if ".gate.weight" not in pair[0]),
            {name: tensor for name, tensor in wanted.items() if "gate.weight" not in name},
        )


@pytest.mark.parametrize("place", [0, 50, 120])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_weights_are_named_at_the_first_look_and_the_next_call_is_sound(place, value):
    online, named = quantizer(layer()), layer()
    broken = [(name, tensor.clone()) for name, tensor in named]
    broken[place][1][-1, -1] = value
    broken[-1][1][0, 0] = value
    for _ in range(2):
        with pytest.raises(CkptkitError, match=re.escape(broken[place][0]) + ".*NaN"):
            [*online.quantize(broken)]
        same(on_the_cpu(online.quantize(named)), expected(named))


def test_a_bucket_is_pickled_as_a_list():
    bucket = quantizer(layer()).quantize(layer())
    copied = pickle.loads(pickle.dumps(bucket))
    assert type(copied) is list
    same(on_the_cpu(copied), on_the_cpu(bucket))
    before = [("lm_head.weight", torch.zeros(1))]
    assert before + bucket == [*before, *bucket]
    assert bucket + before == [*bucket, *before]


def launched(online, named):
    online.quantize(named)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        online.quantize(named)
        torch.cuda.synchronize()
    launches = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in launches if not name.startswith("Mem")]


def test_a_layer_takes_one_launch_and_one_that_clears_the_marks():
    assert len(launched(quantizer(layer()), layer())) == 2


FP8 = {
    "block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128), "online", 3),
    "powers of two": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        (128, 128),
        "deepgemm",
        3,
    ),
    "mxfp8": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, (1, 32), "modelopt", 2),
}


def in_fp8(kind, named):
    scales = [f"{name}_scale_inv" for name, _ in named if ".experts." in name]
    return OnlineQuantizer({"quantization_config": FP8[kind][0]}, [*(name for name, _ in named), *scales])


def expected_fp8(kind, named):
    found = {}
    for name, tensor in named:
        found[name] = tensor.cpu()
        if ".experts." in name:
            _, block, rounding, _ = FP8[kind]
            found[name], found[f"{name}_scale_inv"] = quantize_fp8(tensor.cpu(), block, rounding, name)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", FP8)
def test_a_bucket_in_fp8_has_the_bytes_of_the_cpu_at_every_call(kind, dtype):
    shapes = [(192, 256), (130, 100) if kind != "mxfp8" else (130, 96)]
    online = in_fp8(kind, layer())
    for seed, wide in enumerate([shapes[0], *shapes]):
        named = layer(dtype, seed, wide)
        if seed == 2:  # shifted by one weight
            named[3] = (named[3][0], torch.cat([named[3][1].flatten()[:1], named[3][1].flatten()])[1:].view(wide))
        bucket, wanted = online.quantize(named), expected_fp8(kind, named)
        assert [name for name, _ in bucket] == list(wanted)
        for name, tensor in bucket:
            assert tensor.is_cuda
            assert tensor.is_contiguous()
            assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape)
            assert torch.equal(tensor.cpu().view(torch.uint8), wanted[name].view(torch.uint8)), name


@pytest.mark.parametrize("kind", FP8)
def test_a_layer_in_fp8_takes_a_launch_for_each_shape_and_a_broken_weight_is_named(kind):
    """Groups of 32 follow one another, so that a matrix and one with its axes swapped share a launch."""
    online, named = in_fp8(kind, layer()), layer()
    assert len(launched(online, named)) == FP8[kind][3]
    named[50][1][-1, -1] = torch.nan
    bucket = online.quantize(named)
    with pytest.raises(CkptkitError, match=re.escape(named[50][0]) + ".*NaN"):
        list(bucket)


def test_a_stream_of_a_whole_model_has_the_bytes_of_the_cpu():
    tensors = release(experts=32)
    online = OnlineQuantizer(config(), names_of(tensors))
    for _ in range(2):
        there = dict(
            pair
            for bucket in online.stream((name, tensor.cuda()) for name, tensor in tensors.items())
            for pair in bucket
        )
        same(on_the_cpu(there.items()), dict(pair for bucket in online.stream(tensors.items()) for pair in bucket))
