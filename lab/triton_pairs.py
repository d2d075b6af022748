"""Times the online INT4 quantizer on a GPU with and without the kernel in inline PTX (quant/kernels/triton_pairs.py).

`PYTHONPATH=. python lab/triton_pairs.py`, with torch for CUDA and Triton. The layers, schemes and ways are those of
`benchmarks/cuda.py`; both kernels run on the same matrices in the same process, pass after pass. Floor: bytes that must
move (2 read and 0.5 + 2 / group written a weight) at the speed of a device copy of this run. Exits with 1 where the
bytes of the two kernels, or of the CPU's formulas, differ.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import torch
import triton

from quant.formats.grids import quantize
from quant.formats.packing import pack
from quant.formats.scheme import QuantScheme, quantization_config
from quant.kernels import triton_launch
from quant.online.cuda import plan_bucket
from quant.online.quantizer import OnlineQuantizer

ROUNDS, IN_A_ROW, PASSES, PAUSE, COPIED = 15, 12, 7, 0.5, 4 << 30
WITH = triton_launch.launcher


def without(scheme, rows, columns, dtype):
    """`launcher` without its branch for pairs, which is what remains when triton_pairs.py is deleted."""
    if scheme.group_size is None:
        return WITH(scheme, rows, columns, dtype)
    stored = scheme.scale_dtype or dtype
    types = triton_launch.TYPES
    options = {
        "WEIGHT": types[dtype],
        "STORED": types[stored],
        "WIDE": types[torch.promote_types(dtype, stored)],
        "MINMAX": scheme.grid == "minmax",
        "ASYMMETRIC": not scheme.symmetric,
        "EPS": torch.finfo(stored).eps,
        "TILE": triton_launch._TILE,
        "num_warps": triton_launch._WARPS,
    } | ({"zeros": None} if scheme.symmetric else {})
    groups = rows * scheme.groups(columns)
    blocks = triton.cdiv(groups, triton_launch._TILE // scheme.group_size)
    return triton_launch.Launcher(
        triton_launch.grouped, blocks, options | {"groups": groups, "GROUP": scheme.group_size}
    )


def experts(count, features, hidden):
    shapes = {"gate_proj": (features, hidden), "up_proj": (features, hidden), "down_proj": (hidden, features)}
    return [(f"{number}.{name}", shape) for number in range(count) for name, shape in shapes.items()]


LAYERS = (
    (
        "Qwen3-30B-A3B, 128 x 3",
        experts(128, 768, 2048),
        (("minmax", 128), ("qmax7", 128), ("minmax", 32), ("qmax7", 32)),
    ),
    (
        "128 x [1536, 2048]",
        [(f"{number}.gate_proj", (1536, 2048)) for number in range(128)],
        (("minmax", 128), ("qmax7", 128)),
    ),
    ("Kimi K2, 384 x 3", experts(384, 2048, 7168), (("minmax", 32), ("qmax7", 32))),
)


def events(call):
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


def copy_speed():
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    speed = 2 * COPIED / events(partial(target.copy_, source))
    del source, target
    torch.cuda.empty_cache()
    return speed


def a_call(call):
    times = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        kept = call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        del kept
    return statistics.median(times[2:])


def in_a_row(call):
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            len(call())
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / IN_A_ROW)
    return statistics.median(times[1:])


def plan_of(named, online):
    """Made while `triton_launch.launcher` is the one to measure."""
    names = [name for name, _ in named]
    return plan_bucket(named, names, frozenset(names), online.form)


def kernels(named, plan):
    """The launches alone, into existing memory."""
    jobs = []
    for kind in plan.kinds:
        places = plan.members[kind.first : kind.first + kind.count]
        table = torch.tensor([named[place][1].data_ptr() for place in places]).cuda()
        outputs = [torch.empty(length, dtype=dtype, device="cuda") for length, dtype in kind.outputs]
        bad = torch.zeros(kind.count, dtype=torch.int32, device="cuda")
        start = kind.launcher
        jobs.append((start.kernel[start.blocks, kind.count], (table, *outputs), start.options | {"bad": bad}))
    return lambda: [kernel(*arguments, **options) for kernel, arguments, options in jobs]


def from_graph(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    seconds = events(graph.replay)
    del kept, graph
    torch.cuda.empty_cache()
    return seconds


def online_of(named, scheme):
    config = {"num_hidden_layers": 1, "quantization_config": quantization_config(scheme)}
    return OnlineQuantizer(config, [name + part for name, _ in named for part in ("_packed", "_scale", "_shape")])


def alone(named, plan):
    """Seconds of the kernels of one bucket, replayed from a graph."""
    return from_graph(kernels(named, plan))


def main() -> int:
    if not hasattr(triton_launch, "paired"):
        sys.exit("this checkout has no triton_pairs.py: nothing to compare")
    speed = copy_speed()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; "
        f"device copy {speed / 1e9:.0f} GB/s, read and written",
        flush=True,
    )
    least = {}
    for what, shapes, cases in LAYERS:
        torch.manual_seed(0)
        named = [
            (
                f"model.layers.0.mlp.experts.{name}.weight",
                torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02,
            )
            for name, shape in shapes
        ]
        weights = sum(weight.numel() for _, weight in named)
        for grid, group in cases:
            scheme = QuantScheme(group, grid)
            floor = weights * (2.5 + 2 / group) / speed
            ways, found = {}, {}
            for label, make in (("PTX", WITH), ("plain", without)):
                triton_launch.launcher = make  # read by Int4Form.launcher when a bucket is planned
                online = online_of(named, scheme)
                found[label] = dict(online.quantize(named))
                ways |= {
                    (label, "a call"): partial(a_call, partial(online.quantize, named)),
                    (label, "in a row"): partial(in_a_row, partial(online.quantize, named)),
                    (label, "kernels alone"): partial(alone, named, plan_of(named, online)),
                }
            for name, tensor in found["PTX"].items():
                if not torch.equal(tensor, found["plain"][name]):
                    print(f"{what}, {grid} {group}: {name} has other bytes without PTX")
                    return 1
            for name, weight in (named[0], named[1], named[-1]):
                codes, scale, _ = quantize(weight.cpu(), scheme, name)
                same = torch.equal(found["plain"][f"{name}_packed"].cpu(), pack(codes))
                if not same or not torch.equal(found["plain"][f"{name}_scale"].cpu(), scale):
                    print(f"{what}, {grid} {group}: {name} has other bytes than the CPU's")
                    return 1
            del found
            times = {way: [] for way in ways}
            for _ in range(PASSES):
                for way, measure in ways.items():
                    times[way].append(measure())
                time.sleep(PAUSE)
            print(f"{what}, {grid} {group}: floor {floor * 1e3:.3f} ms")
            for way in ("a call", "in a row", "kernels alone"):
                cells = []
                for label in ("PTX", "plain"):
                    passes = times[label, way]
                    usual = statistics.median(passes)
                    cells.append(
                        f"{label} {usual * 1e3:.3f} ms (least {min(passes) * 1e3:.3f}), floor/time {floor / usual:.3f}"
                    )
                    least.setdefault((label, way), []).append((floor / usual, f"{what}, {grid} {group}"))
                plain = statistics.median(times["plain", way]) / statistics.median(times["PTX", way])
                print(f"  {way}: {'; '.join(cells)}; plain/PTX {plain:.3f}", flush=True)
        del named, ways, online
        torch.cuda.empty_cache()
    print("least floor/time:")
    for (label, way), ratios in least.items():
        ratio, where = min(ratios)
        print(f"  {label}, {way}: {ratio:.3f} ({where})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
