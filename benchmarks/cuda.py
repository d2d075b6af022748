"""Quantizing on a GPU: the online quantizer's call and kernels, torch.compile, compressed-tensors, and the least time.

That floor is the bytes that must move (2 read a weight; written 0.5 and 2 / group in INT4, 1 and its share of a scale
in FP8) at the speed of a device copy measured in the same run. All work on the same BF16 matrices; the results are held
to the formulas on the CPU before anything is timed.

- `a call`: by the clock, from the Python call until the GPU is done; what it returned is dropped after that.
- `calls in a row`: one bucket after the other by the clock, as a trainer streams them, each result dropped at once.
- `in a row, every tensor looked at`: the same with a pass over every name and tensor of each result.
- `kernels alone`: one launch for each size of matrix into existing memory, from a CUDA graph, by CUDA events.
- `torch.compile`: the same expression on the matrices of a shape as one stacked tensor (stacking them is not timed), a
  call for each shape, everything by the clock; `from a graph`: its kernels alone.
- compressed-tensors' own functions, a matrix at a time, on some of them: scaled up. Of FP8 the formulas in plain torch.

torch.compile is timed for INT4 alone. Arguments: what a scheme's name must contain, as `fp8` or `mxfp8`.

`ms` is the median of several passes, some time apart, over all of these ways; `least` and `most` are those of a pass.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from torch import Tensor

from ckptkit.quant.formats.grids import quantize
from ckptkit.quant.formats.packing import pack
from ckptkit.quant.formats.scheme import QuantScheme, quantization_config
from ckptkit.quant.kernels.floats import quantize_fp8
from ckptkit.quant.online.form import Fp8Form
from ckptkit.quant.online.quantizer import OnlineQuantizer

ROUNDS = 15
IN_A_ROW = 12
PASSES, PAUSE = 5, 0.7  # seconds: a virtual machine's cores may be slow for seconds together
COPIED = 4 << 30  # bytes
SAMPLE = 16  # matrices for compressed-tensors

FP8: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8, powers of two": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
}

Named = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Layer:
    """The routed experts of a layer: how many, and the shapes of their projections."""

    what: str
    experts: int
    shapes: tuple[tuple[str, tuple[int, int]], ...]
    cases: tuple[tuple[str, int], ...]  # grids and group sizes

    def named(self) -> Named:
        """BF16 matrices by name, as a trainer has them."""
        return [
            (
                f"model.layers.0.mlp.experts.{expert}.{projection}.weight",
                torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02),
            )
            for expert in range(self.experts)
            for projection, shape in self.shapes
        ]


def _experts(features: int, hidden: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("gate_proj", (features, hidden)), ("up_proj", (features, hidden)), ("down_proj", (hidden, features))


LAYERS = (
    Layer(
        "Qwen3-30B-A3B, a layer: 128 x 3",
        128,
        _experts(768, 2048),
        (("minmax", 128), ("qmax7", 128), ("minmax", 32), ("qmax7", 32)),
    ),
    Layer("128 x [1536, 2048]", 128, (("gate_proj", (1536, 2048)),), (("minmax", 128), ("qmax7", 128))),
    Layer("Kimi K2, a layer: 384 x 3", 384, _experts(2048, 7168), (("minmax", 32), ("qmax7", 32))),
)


def rows(*wanted: str) -> list[dict[str, Any]]:
    """A row for each layer, scheme and way. Empty without CUDA. Raises SystemExit for bytes other than the CPU's.

    `wanted`: what the name of a scheme must contain one of; all without it.
    """
    if not torch.cuda.is_available():
        return []
    speed = _copy_speed()
    found: list[dict[str, Any]] = [{"layer": "device copy, bytes read and written", "way": f"{speed / 1e9:.0f} GB/s"}]
    for layer in LAYERS:
        named = layer.named()
        for grid, group in layer.cases:
            if _is_wanted(f"{grid}, groups of {group}", wanted):
                found += _rows(layer.what, named, QuantScheme(group, grid), speed)  # type: ignore[arg-type]
        for name in FP8:
            if _is_wanted(name, wanted):
                found += _fp8_rows(layer.what, named, name, speed)
        del named
        torch.cuda.empty_cache()
    return found


def _is_wanted(scheme: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(part in scheme for part in wanted)


def _rows(what: str, named: Named, scheme: QuantScheme, speed: float) -> list[dict[str, Any]]:
    online, group = _online(named, scheme), scheme.group_size or 1
    floor = sum(weight.numel() for _, weight in named) * (2.5 + 2 / group) / speed
    _check(named, online, scheme)
    call, compiled = partial(online.quantize, named), _compiled(named, scheme)
    sample = [weight for _, weight in named[:SAMPLE]]
    ways: dict[str, Callable[[], float]] = {
        "a call": partial(_clock, call),
        "calls in a row": partial(_in_a_row, call, len),
        "in a row, every tensor looked at": partial(_in_a_row, call, list),
        "kernels alone": partial(_graph, _kernels(named, online)),
        "torch.compile": partial(_clock, compiled),
        "torch.compile from a graph": partial(_graph, compiled),
    }
    if scheme.grid == "minmax":
        ways["compressed-tensors"] = lambda: (
            _clock(partial(_compressed_tensors, sample, group)) / len(sample) * len(named)
        )
    return _timed(what, f"{scheme.grid}, groups of {group}", ways, floor)


def _fp8_rows(what: str, named: Named, scheme: str, speed: float) -> list[dict[str, Any]]:
    names = [part for name, _ in named for part in (name, f"{name}_scale_inv")]
    online = OnlineQuantizer({"quantization_config": FP8[scheme]}, names)
    form = online.form
    assert isinstance(form, Fp8Form)
    made = dict(online.quantize(named))
    floor = sum(tensor.nbytes for tensor in (*made.values(), *(weight for _, weight in named))) / speed
    for name, weight in (*named[:3], named[len(named) // 2], *named[-3:]):
        expected = zip(("", "_scale_inv"), quantize_fp8(weight.cpu(), form.block, form.rounding, name), strict=True)
        if not all(torch.equal(made[name + part].cpu().view(torch.uint8), t.view(torch.uint8)) for part, t in expected):
            raise SystemExit(f"{name}: the bytes are not those of the CPU, so there is nothing to compare")
    del made
    call, sample = partial(online.quantize, named), named[:SAMPLE]

    def torch_alone() -> None:
        for name, weight in sample:
            quantize_fp8(weight, form.block, form.rounding, name, kernel=False)

    ways: dict[str, Callable[[], float]] = {
        "a call": partial(_clock, call),
        "calls in a row": partial(_in_a_row, call, len),
        "in a row, every tensor looked at": partial(_in_a_row, call, list),
        "kernels alone": partial(_graph, _kernels(named, online)),
        "plain torch": lambda: _clock(torch_alone) / len(sample) * len(named),
    }
    return _timed(what, scheme, ways, floor)


def _timed(what: str, scheme: str, ways: dict[str, Callable[[], float]], floor: float) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(PASSES):
        for way, measure in ways.items():
            times[way].append(measure())
        time.sleep(PAUSE)
    torch.cuda.empty_cache()
    return [
        {
            "layer": what,
            "scheme": scheme,
            "way": way,
            "ms": f"{statistics.median(found) * 1e3:.3f}",
            "least": f"{min(found) * 1e3:.3f}",
            "most": f"{max(found) * 1e3:.3f}",
            "floor ms": f"{floor * 1e3:.3f}",
            "of the floor's speed": f"{floor / statistics.median(found):.3f}",
        }
        for way, found in times.items()
    ]


def _online(named: Iterable[tuple[str, Tensor]], scheme: QuantScheme) -> OnlineQuantizer:
    config = {"num_hidden_layers": 1, "quantization_config": quantization_config(scheme)}
    return OnlineQuantizer(config, [name + part for name, _ in named for part in ("_packed", "_scale", "_shape")])


def _check(named: Named, online: OnlineQuantizer, scheme: QuantScheme) -> None:
    """Raises SystemExit where the first, a middle or the last expert has other bytes than the CPU's formulas give."""
    bucket = dict(online.quantize(named))
    for name, weight in (*named[:3], named[len(named) // 2], *named[-3:]):
        codes, scale, _ = quantize(weight.cpu(), scheme, name)
        expected = {"_packed": pack(codes), "_scale": scale, "_shape": torch.tensor(weight.shape)}
        if not all(torch.equal(bucket[name + part].cpu(), tensor) for part, tensor in expected.items()):
            raise SystemExit(f"{name}: the bytes are not those of the CPU, so there is nothing to compare")


def _copy_speed() -> float:
    """Bytes read and written a second."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    speed = 2 * COPIED / _events(partial(target.copy_, source))
    del source, target
    torch.cuda.empty_cache()
    return speed


def _events(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def _graph(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    seconds = _events(graph.replay)
    del kept, graph
    torch.cuda.empty_cache()  # what it was captured with
    return seconds


def _clock(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        kept = call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        del kept
    return statistics.median(times[2:])


def _in_a_row(call: Callable[[], Any], look: Callable[[Any], object]) -> float:
    """Seconds a call."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            look(call())
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / IN_A_ROW)
    return statistics.median(times[1:])


def _kernels(named: Named, online: OnlineQuantizer) -> Callable[[], object]:
    # Imported here because it needs Triton, which is there wherever torch has CUDA.
    from ckptkit.quant.online.cuda import plan_bucket

    names = [name for name, _ in named]
    plan = plan_bucket(named, names, frozenset(names), online.form)
    assert plan is not None
    jobs = []
    for kind in plan.kinds:
        places = plan.members[kind.first : kind.first + kind.count]
        table = torch.tensor([named[place][1].data_ptr() for place in places]).cuda()
        outputs = [torch.empty(length, dtype=dtype, device="cuda") for length, dtype in kind.outputs]
        bad = torch.zeros(kind.count, dtype=torch.int32, device="cuda")
        start = kind.launcher
        jobs.append((start.kernel[start.blocks, kind.count], (table, *outputs), start.options | {"bad": bad}))
    return lambda: [kernel(*arguments, **options) for kernel, arguments, options in jobs]


def _compiled(named: Named, scheme: QuantScheme) -> Callable[[], object]:
    shapes: dict[torch.Size, list[Tensor]] = {}
    for _, weight in named:
        shapes.setdefault(weight.shape, []).append(weight)
    stacks = [torch.stack(weights) for weights in shapes.values()]
    torch.compiler.reset()
    function = torch.compile(
        partial(_expression, group=scheme.group_size or 1, minmax=scheme.grid == "minmax"), dynamic=False
    )
    return lambda: [function(stack) for stack in stacks]


def _expression(weights: Tensor, group: int, minmax: bool) -> tuple[Tensor, Tensor]:
    """Words and scales of [matrices, rows, columns], by the formulas of `ckptkit.quant.formats.grids`."""
    count, rows, columns = weights.shape
    groups = weights.reshape(count, rows, columns // group, group)
    high = groups.abs().amax(-1)
    if minmax:
        scale = high / 7.5
        scale = torch.where(scale == 0, 0.0078125, scale)
        codes = (groups / scale.unsqueeze(-1)).clamp(-8, 7).round()
    else:
        scale = (high.float() * (1 / 7)).clamp(min=1e-5)
        codes = (groups.float() / scale.unsqueeze(-1)).round()
    nibbles = (codes.to(torch.int32) + 8).reshape(count, rows, columns // 8, 8)
    words = (nibbles << torch.arange(0, 32, 4, device=weights.device, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return words, scale.bfloat16()


def _compressed_tensors(weights: Sequence[Tensor], group: int) -> None:
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    for weight in weights:
        scale, zero = compute_dynamic_scales_and_zp(weight, args, torch.nn.Linear(1, 1))
        PackedQuantizationCompressor.compress(
            {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme
        )


if __name__ == "__main__":
    for one in rows(*sys.argv[1:]):
        print(*one.values(), sep=" | ")
