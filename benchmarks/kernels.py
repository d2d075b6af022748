"""Quantizing and packing on the CPU against compressed-tensors on the same tensors, in the same run.

The compressed-tensors path is `calculate_qparams` on each group's minimum and maximum, as its observers call it, then
`PackedQuantizationCompressor.compress`. Runs are interleaved; times are medians. Both use every core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from measure import SMALLEST
from torch import Tensor

from ckptkit.quant.formats.scheme import Grid, QuantScheme
from ckptkit.quant.kernels.dispatch import quantize_pack

ROUNDS = 5
MATRICES, ROWS, COLUMNS = (1, 128, 512) if SMALLEST else (1, 2048, 7168)  # a projection of an expert of Kimi K2, 29 MB
CASES: tuple[tuple[str, QuantScheme], ...] = (
    ("qmax7, groups of 128", QuantScheme(128, "qmax7")),
    ("qmax7, groups of 32", QuantScheme(32, "qmax7")),
    ("minmax, groups of 128", QuantScheme(128, "minmax")),
    ("minmax, groups of 32", QuantScheme(32, "minmax")),
    ("minmax, asymmetric, groups of 128", QuantScheme(128, "minmax", symmetric=False)),
    ("minmax, one scale a row", QuantScheme(None, "minmax")),
)


def rows() -> list[dict[str, object]]:
    """Times each scheme: `what`, `seconds` (ckptkit), `baseline` seconds (compressed-tensors), `ratio` (speedup).

    compressed-tensors has only the minmax grid, so qmax7 is compared with that too. Raises SystemExit when the minmax
    bytes differ.
    """
    torch.manual_seed(0)
    weights = [(torch.randn(ROWS, COLUMNS) * 0.02).bfloat16() for _ in range(MATRICES)]
    return [_row(what, weights, scheme) for what, scheme in CASES]


def _row(what: str, weights: list[Tensor], scheme: QuantScheme) -> dict[str, object]:
    theirs = _scheme(scheme)

    def own() -> list[Tensor]:
        return [packed.words for packed in quantize_pack(weights, scheme, ["weight"] * len(weights))]

    def other() -> list[Tensor]:
        return [_compress(weight, theirs) for weight in weights]

    _check(own(), other(), scheme.grid)  # which also compiles, and warms the caches of both
    seconds: list[float] = []
    baseline: list[float] = []
    for _ in range(ROUNDS):
        seconds.append(_timed(own))
        baseline.append(_timed(other))
    ours, reference = statistics.median(seconds), statistics.median(baseline)
    return {
        "what": what,
        "seconds": round(ours, 5),
        "baseline": round(reference, 3),
        "ratio": round(reference / ours, 1),
    }


def _scheme(scheme: QuantScheme) -> QuantizationScheme:
    strategy = "group" if scheme.group_size else "channel"
    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=scheme.symmetric, strategy=strategy, group_size=scheme.group_size
    )
    return QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")


def _compress(weight: Tensor, scheme: QuantizationScheme) -> Tensor:
    groups = weight.reshape(weight.shape[0], -1, scheme.weights.group_size or weight.shape[1])
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    words: Tensor = PackedQuantizationCompressor.compress(state, scheme)["weight_packed"]
    return words


def _check(ours: list[Tensor], theirs: list[Tensor], grid: Grid) -> None:
    if grid == "minmax" and not all(map(torch.equal, ours, theirs)):
        raise SystemExit("the packed words are not those of compressed-tensors: there is nothing to compare")


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
