"""What the host does with a bucket for a GPU: decided once, in a few launches, with tensors made at the first look.

The kernels are replaced by the formulas, so that no GPU is needed; tests/gpu/test_online_call_gpu.py has the kernels.
"""

import pickle
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support.messages import refusal
from support.online_model import GROUP, config, names_of, same
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.grids import quantize
from ckptkit.quant.formats.packing import pack
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.kernels.floats import quantize_fp8
from ckptkit.quant.online.form import Fp8Form, Int4Form
from ckptkit.quant.online.quantizer import OnlineQuantizer
from ckptkit.quant.online.served import Served
from ckptkit.verify.evidence.extremes import same_bytes

pytest.importorskip("triton")

EXPERTS = 100
SHAPES = {"gate_proj": (16, 64), "up_proj": (16, 64), "down_proj": (64, 32)}


def layer(seed=0, dtype=torch.bfloat16, experts=EXPERTS):
    """Experts of two sizes, and a router after the first of them."""
    draw = torch.Generator().manual_seed(seed)
    named = [
        (f"model.layers.0.mlp.experts.{expert}.{name}.weight", torch.randn(shape, generator=draw).to(dtype))
        for expert in range(experts)
        for name, shape in SHAPES.items()
    ]
    return [*named[:5], ("model.layers.0.mlp.gate.weight", torch.ones(experts, 64)), *named[5:]]


def expected(named):
    found = {}
    for name, tensor in named:
        if ".experts." not in name:
            found[name] = tensor
            continue
        codes, scale, _ = quantize(tensor, QuantScheme(GROUP, "minmax"), name)
        found |= {f"{name}_packed": pack(codes), f"{name}_scale": scale, f"{name}_shape": torch.tensor(tensor.shape)}
    return found


@dataclass(frozen=True)
class Formula:
    """Stands for the launcher of matrices of one size."""

    size: int
    formula: Callable[[Tensor], tuple[Tensor, Tensor]]
    launches: list[int]

    def start(self, weights, outputs, bad):
        self.launches.append(len(weights))
        for place, weight in enumerate(weights):
            try:
                made = self.formula(weight)
            except CkptkitError:
                bad[place] = 1
                continue
            for output, part in zip(outputs, made, strict=True):
                output.view(len(weights), -1)[place] = part.flatten()


def int4(weight):
    codes, scale, _ = quantize(weight, QuantScheme(GROUP, "minmax"))
    return pack(codes), scale


def fp8(weight):
    return quantize_fp8(weight, (128, 128), "online", "a")


@pytest.fixture
def launches(monkeypatch):
    from ckptkit.quant.online import cuda as online_cuda

    found = []
    for form, formula in ((Int4Form, int4), (Fp8Form, fp8)):
        launcher = partial(lambda formula, weight: Formula(weight.numel(), formula, found), formula)
        monkeypatch.setattr(form, "launcher", staticmethod(launcher))
    monkeypatch.setattr(Fp8Form, "has_kernel", lambda self, weight: True)
    monkeypatch.setattr(online_cuda, "working_on", nullcontext)
    monkeypatch.setattr(online_cuda, "done", lambda device: lambda: None)
    monkeypatch.setattr(
        online_cuda, "_is_plain", lambda weight, device: weight.is_contiguous() and weight.device == device
    )
    monkeypatch.setattr(
        OnlineQuantizer,
        "_plan",
        lambda self, pairs, known: online_cuda.plan_bucket(pairs, known, self.served.packed, self.form),
    )
    return found


def quantizer(named):
    return OnlineQuantizer(config(), names_of([name for name, _ in named]))


def test_every_call_gives_the_tensors_in_order_with_the_bytes_of_the_formulas(launches):
    """Each size of matrix is a launch."""
    online = quantizer(layer())
    for seed in range(3):
        wanted = expected(layer(seed))
        bucket = online.quantize(iter(layer(seed)))
        assert len(bucket) == len(wanted) == 901
        assert [name for name, _ in bucket] == list(wanted)
        assert all(tensor.is_contiguous() for _, tensor in bucket)
        same(dict(bucket), wanted)
    assert launches == [200, 100] * 3


@pytest.mark.usefixtures("launches")
def test_names_are_decided_once_and_not_at_every_call(monkeypatch):
    asked = []
    name = Served.name
    monkeypatch.setattr(Served, "name", lambda self, *what: asked.append(what[0]) or name(self, *what))
    online = quantizer(layer())
    for seed in range(3):
        online.quantize(layer(seed))
    assert len(asked) == len(layer())


@pytest.mark.usefixtures("launches")
def test_other_tensors_and_other_orders_are_worked_out_anew(monkeypatch):
    online = quantizer(layer())
    for named in (layer(), layer(dtype=torch.float32), [layer()[0], *layer()[:0:-1]], layer(1)):
        bucket = online.quantize(named)
        assert [name for name, _ in bucket] == list(expected(named))
        same(dict(bucket), expected(named))
    monkeypatch.setitem(SHAPES, "up_proj", (32, 32))
    same(dict(online.quantize(layer())), expected(layer()))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("place", [0, 150, 300])
def test_a_broken_weight_is_named_at_every_look_at_its_bucket(place):
    online = quantizer(layer())
    broken = layer()
    for at in {place, 300}:
        broken[at][1][-1, -1] = torch.nan
    for bucket in (online.quantize(broken), online.quantize(broken)):
        for look in (list, pickle.dumps, lambda bucket: bucket[0]):
            refusal(f"^{broken[place][0]} has NaN".replace(".", r"\."), look, bucket)
        same(dict(online.quantize(layer())), expected(layer()))


@pytest.mark.usefixtures("launches")
def test_what_was_quantized_is_not_kept_after_a_look_and_what_passes_is_not_copied():
    online, named = quantizer(layer()), layer()
    online.quantize(layer())
    kept = [weakref.ref(tensor.untyped_storage()) for _, tensor in named if tensor.dtype == torch.bfloat16]
    router = named[5][1]
    bucket = online.quantize(named)
    named.clear()
    assert len([*bucket]) == 901
    assert [reference() for reference in kept] == [None] * 300
    assert dict(bucket)["model.layers.0.mlp.gate.weight"].data_ptr() == router.data_ptr()


@pytest.mark.usefixtures("launches")
def test_a_result_is_read_like_a_list_and_pickled_as_one():
    bucket = quantizer(layer()).quantize(layer())
    pairs = [*bucket]
    assert bucket[3] is pairs[3]
    assert bucket[-2:] == pairs[-2:]
    assert [pair[0] for pair in reversed(bucket)] == [name for name, _ in pairs[::-1]]
    before = [("lm_head.weight", torch.zeros(1))]
    assert before + bucket == [*before, *pairs]
    assert bucket + before == [*pairs, *before]
    again = pickle.loads(pickle.dumps(bucket))
    assert type(again) is list
    same(dict(again), dict(pairs))


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def in_fp8(named):
    scales = [f"{name}_scale_inv" for name, _ in named if ".experts." in name]
    return OnlineQuantizer(FP8, [*(name for name, _ in named), *scales])


def test_fp8_goes_the_same_way_with_two_tensors_a_matrix_and_no_shape(launches, monkeypatch):
    monkeypatch.setitem(SHAPES, "gate_proj", (130, 200))
    monkeypatch.setitem(SHAPES, "down_proj", (200, 130))
    scales = [f"{name}_scale_inv" for name, _ in layer() if ".experts." in name]
    online = OnlineQuantizer(FP8, [*(name for name, _ in layer()), *scales])
    for seed in range(2):
        wanted = {}
        for name, tensor in layer(seed):
            made = fp8(tensor) if ".experts." in name else (tensor,)
            wanted |= zip((name, f"{name}_scale_inv"), made, strict=False)
        bucket = online.quantize(layer(seed))
        assert [name for name, _ in bucket] == list(wanted)
        assert all(same_bytes(tensor, wanted[name]) for name, tensor in bucket)
    assert launches == [100, 200, 100, 200]
    broken = layer()
    broken[150][1][-1, -1] = torch.inf
    refusal("^" + re.escape(broken[150][0]) + ".*NaN", list, online.quantize(broken))


def test_few_matrices_come_as_a_list(launches):
    named = layer(experts=4)
    bucket = quantizer(named).quantize(named)
    assert isinstance(bucket, list)
    same(dict(bucket), expected(named))
    assert launches == []
    assert quantizer(named).quantize([]) == []
