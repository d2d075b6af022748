"""Quantizing on a GPU against the least time that its memory allows, and against compressed-tensors on the same tensors.

The floor of a matrix is the bytes that must move (2 read, 0.5 and 2 / group written a weight) at the speed of a device copy measured
in the same run. Times are medians of CUDA events; the layer of experts is also timed by the clock, from the call to its return.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from torch import Tensor

from quant.kernels import quantize_pack
from quant.scheme import QuantScheme

ROUNDS = 10
COPIED = 4 << 30  # bytes
MATRIX = (2048, 7168)  # an expert of Kimi K2


def rows() -> list[dict[str, Any]]:
    """A row for each grid and group size, for a whole layer, and for compressed-tensors. Empty without CUDA."""
    if not torch.cuda.is_available():
        return []
    speed = _copy_speed()
    found: list[dict[str, Any]] = [{"what": "device copy", "GB/s": round(speed / 1e9)}]
    experts = [torch.randn(MATRIX, device="cuda").mul_(0.02).bfloat16() for _ in range(48)]
    many = experts * 24
    for grid, group, symmetric in (("qmax7", 32, True), ("qmax7", 128, True), ("minmax", 32, True), ("minmax", 128, True), ("minmax", 128, False)):
        scheme = QuantScheme(group, grid, symmetric=symmetric)
        seconds = _events(partial(quantize_pack, many, scheme, _names(many)))
        found.append(_row(f"1152 experts, {grid}{'' if symmetric else ', asymmetric'}, groups of {group}", many, scheme, seconds, speed))
        if grid == "minmax" and symmetric:
            found.append(_compressed_tensors(experts[:8], group, seconds / len(many)))
    layer = experts * 16 + [expert.view(MATRIX[1], MATRIX[0]) for expert in experts] * 8
    scheme = QuantScheme(32, "qmax7")
    call = partial(quantize_pack, layer, scheme, _names(layer))
    found.append(_row("a layer of 384 experts x 3, events", layer, scheme, _events(call), speed))
    found.append(_row("a layer of 384 experts x 3, wall clock", layer, scheme, _clock(call), speed))
    return found


def _names(weights: Sequence[Tensor]) -> list[str]:
    return list(map(str, range(len(weights))))


def _row(what: str, weights: Sequence[Tensor], scheme: QuantScheme, seconds: float, speed: float) -> dict[str, Any]:
    count = sum(weight.numel() for weight in weights)
    floor = count * (2 + 0.5 + 2 / (scheme.group_size or 1)) / speed
    return {"what": what, "ms": round(seconds * 1e3, 3), "floor ms": round(floor * 1e3, 3), "of the floor's speed": round(floor / seconds, 3)}


def _copy_speed() -> float:
    """Bytes read and written a second."""
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPIED / _events(partial(target.copy_, source))


def _events(call: Callable[[], object]) -> float:
    call()
    call()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _clock(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _compressed_tensors(weights: Sequence[Tensor], group: int, ours: float) -> dict[str, Any]:
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")

    def call() -> None:
        for weight in weights:
            scale, zero = compute_dynamic_scales_and_zp(weight, args, torch.nn.Linear(1, 1))
            PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)

    seconds = _events(call) / len(weights)
    return {"what": f"compressed-tensors, an expert, groups of {group}", "ms": round(seconds * 1e3, 3), "ratio to ours": round(seconds / ours, 1)}


if __name__ == "__main__":
    for one in rows():
        print(one)
