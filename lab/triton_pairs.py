"""Times the online INT4 quantizer on a GPU with and without the kernel in inline PTX (quant/kernels/triton_kernels.py).

`PYTHONPATH=.:benchmarks python lab/triton_pairs.py`, with torch for CUDA and Triton. Layers and ways of timing are
those of `benchmarks/cuda.py`; both kernels run on the same matrices in the same process, pass after pass.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import cuda
import torch
import triton

from ckptkit.quant.formats.scheme import QuantScheme, quantization_config
from ckptkit.quant.kernels import triton_kernels
from ckptkit.quant.online.quantizer import OnlineQuantizer

WITH = triton_kernels.launcher


def without(scheme, rows, columns, dtype):
    """`launcher` without its branch for pairs, which is what remains when `paired` is deleted."""
    stored = scheme.scale_dtype or dtype
    types = triton_kernels.TYPES
    options = {
        "WEIGHT": types[dtype],
        "STORED": types[stored],
        "WIDE": types[torch.promote_types(dtype, stored)],
        "MINMAX": scheme.grid == "minmax",
        "ASYMMETRIC": not scheme.symmetric,
        "EPS": torch.finfo(stored).eps,
        "TILE": triton_kernels._TILE,
        "num_warps": triton_kernels._WARPS,
    } | ({"zeros": None} if scheme.symmetric else {})
    groups = rows * scheme.groups(columns)
    blocks = triton.cdiv(groups, triton_kernels._TILE // scheme.group_size)
    return triton_kernels.Launcher(
        triton_kernels.grouped, blocks, options | {"groups": groups, "GROUP": scheme.group_size}
    )


def compare(layer: cuda.Layer, speed: float) -> None:
    """Prints the floor by the time of each way, with the kernel and without it. Raises where the bytes differ."""
    named = layer.named()
    names = [name + part for name, _ in named for part in ("_packed", "_scale", "_shape")]
    weights = sum(weight.numel() for _, weight in named)
    for grid, group in layer.cases:
        scheme = QuantScheme(group, grid)
        ways, found = {}, {}
        for label, make in (("PTX", WITH), ("plain", without)):
            triton_kernels.launcher = make  # read where a bucket is planned
            config = {"num_hidden_layers": 1, "quantization_config": quantization_config(scheme)}
            online = OnlineQuantizer(config, names)
            found[label] = dict(online.quantize(named))
            call = partial(online.quantize, named)
            ways[label, "a call"] = partial(cuda._clock, call)
            ways[label, "in a row"] = partial(cuda._in_a_row, call, len)
            ways[label, "kernels alone"] = partial(cuda._graph, cuda._kernels(named, online))
        assert all(torch.equal(tensor, found["plain"][name]) for name, tensor in found["PTX"].items())
        del found
        times = {way: [] for way in ways}
        for _ in range(cuda.PASSES):
            for way, measure in ways.items():
                times[way].append(measure())
            time.sleep(cuda.PAUSE)
        floor = weights * (2.5 + 2 / group) / speed
        for (label, way), measured in times.items():
            part = floor / statistics.median(measured)
            print(f"{layer.what}, {grid} {group}, {way}, {label}: {part:.2f} of the floor")


if __name__ == "__main__":
    speed = cuda._copy_speed()
    for layer in cuda.LAYERS:
        compare(layer, speed)
