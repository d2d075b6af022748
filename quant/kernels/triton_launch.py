"""Launches the Triton kernels for hundreds of matrices at once and returns packed tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from quant.formats.grids import check, not_finite
from quant.formats.packing import Packed
from quant.formats.scheme import CODES_PER_WORD, QuantScheme
from quant.kernels.triton_kernel import channelwise, grouped, pack_zeros
from quant.kernels.triton_pairs import paired

_TILE, _WARPS = 1024, 1  # weights a program takes; a single warp never waits for others
_PAIRED_TILE, _PAIRED_WARPS = 2048, 2
_ALIGNMENT = 16  # bytes of one load
_FIRST, _MAX_LAUNCH = 64, 1024  # matrices of the first and of the largest launch: their number doubles
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

Made = TypeVar("Made")


@dataclass(frozen=True)
class Launcher:
    """Starts `kernel` for non-empty matrices of one size and dtype. `options` are its other arguments, by name."""

    kernel: Any
    blocks: int
    options: Mapping[str, Any]

    def start(self, weights: Sequence[Tensor], outputs: Sequence[Tensor], bad: Tensor) -> None:
        """Quantizes contiguous matrices on the current stream; the current device must be theirs.

        Writes each of `outputs` (of INT4 words, scales and, if asymmetric, zero points; of FP8 codes and scales) matrix
        after matrix. Sets `bad`, int32, to 1 for each matrix with a weight or a scale that is not finite.
        """
        places = _places(weights)
        if int(np.bitwise_or.reduce(places)) % _ALIGNMENT:
            # A clone may be freed once the kernel is started: whatever reuses its memory runs after the kernel.
            weights = [weight.clone() if weight.data_ptr() % _ALIGNMENT else weight for weight in weights]
            places = _places(weights)
        # Does not wait for earlier launches: unpinned memory is copied aside before the call returns.
        table = torch.from_numpy(places).to(bad.device, non_blocking=True)
        self.kernel[self.blocks, len(weights)](table, *outputs, bad=bad, **self.options)


def _places(weights: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(map(Tensor.data_ptr, weights), np.int64, len(weights))


def launcher(scheme: QuantScheme, rows: int, columns: int, dtype: torch.dtype) -> Launcher:
    """Returns the launcher for matrices [rows, columns]. With groups only rows x columns matters."""
    stored = scheme.scale_dtype or dtype
    in_pairs = scheme.group_size and dtype == stored == torch.bfloat16
    formats = {"WEIGHT": TYPES[dtype], "STORED": TYPES[stored], "WIDE": TYPES[torch.promote_types(dtype, stored)]}
    tile, warps = (_PAIRED_TILE, _PAIRED_WARPS) if in_pairs else (_TILE, _WARPS)
    grid = {"MINMAX": scheme.grid == "minmax", "ASYMMETRIC": not scheme.symmetric, "EPS": torch.finfo(stored).eps}
    options = grid | {"TILE": tile, "num_warps": warps} | ({} if in_pairs else formats)
    options |= {"zeros": None} if scheme.symmetric else {}
    if scheme.group_size is None:
        return Launcher(channelwise, rows, options | {"rows": rows, "columns": columns})
    groups = rows * scheme.groups(columns)
    return Launcher(
        paired if in_pairs else grouped,
        triton.cdiv(groups, tile // scheme.group_size),
        options | {"groups": groups, "GROUP": scheme.group_size},
    )


def working_on(device: torch.device) -> torch.cuda.device:
    """Makes `device` the current one in a `with` block."""
    return torch.cuda.device(device)


def done(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits for all work started so far on the device's current stream."""
    event = torch.cuda.current_stream(device).record_event()
    return lambda: event.synchronize()


def quantize_pack_cuda(weights: Sequence[Tensor], scheme: QuantScheme, names: Sequence[str]) -> list[Packed]:
    """Implements `quant.kernels.dispatch.quantize_pack` for CUDA tensors; results of one launch share their memory.

    Raises CkptkitError as `quantize_pack` does.
    """

    def launch(members: Sequence[int], bad: Tensor) -> Iterator[Packed]:
        check(weights[members[0]], scheme, names[members[0]])
        return _launch([weights[index] for index in members], scheme, bad)

    def error(index: int, packed: Packed) -> CkptkitError:
        return not_finite(weights[index], packed.scale.dtype, names[index])

    return run_launches(weights, launch, error)


def run_launches(
    weights: Sequence[Tensor],
    launch: Callable[[Sequence[int], Tensor], Iterable[Made]],
    error: Callable[[int, Made], CkptkitError],
) -> list[Made]:
    """Quantizes matrices of one GPU in launches of one shape and dtype each, and waits once, at the end.

    `launch` starts one for the weights of these indices and returns the result of each; it sets what it is given,
    int32, to 1 for each that is not finite. Raises the `error` of the first of those.
    """
    made: dict[int, Made] = {}
    bad = torch.zeros(len(weights), dtype=torch.int32, device=weights[0].device)
    for members in _launches(weights):
        made |= zip(members, launch(members, bad[len(made) :]), strict=True)
    wrong = [index for index, flag in zip(made, bad.tolist(), strict=True) if flag]
    if wrong:
        first = min(wrong)
        raise error(first, made[first])
    return [made[index] for index in range(len(weights))]


def _launches(weights: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yields the indices of the weights of each launch.

    The first launches are small, so that the GPU starts early and works while the host looks at thousands of others.
    """
    waiting: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    most = _FIRST
    for index, weight in enumerate(weights):
        kind = (weight.shape, weight.dtype)
        members = waiting.setdefault(kind, [])
        members.append(index)
        if len(members) == most:
            most = min(2 * most, _MAX_LAUNCH)
            yield waiting.pop(kind)
    yield from waiting.values()


def _launch(weights: Sequence[Tensor], scheme: QuantScheme, bad: Tensor) -> Iterator[Packed]:
    """Quantizes matrices of one shape and dtype; sets `bad`, int32, to 1 for each with a scale that is not finite."""
    count, (rows, columns), dtype, device = len(weights), weights[0].shape, weights[0].dtype, weights[0].device
    stored = scheme.scale_dtype or dtype
    groups = scheme.groups(columns)
    words = torch.empty((count, rows, columns // CODES_PER_WORD), dtype=torch.int32, device=device)
    scale = torch.empty((count, rows, groups), dtype=stored, device=device)
    zero = torch.empty((count, rows, groups), dtype=torch.int8, device=device) if not scheme.symmetric else None
    zeros = (
        torch.empty((count, triton.cdiv(rows, CODES_PER_WORD), groups), dtype=torch.int32, device=device)
        if not scheme.symmetric
        else None
    )
    with working_on(device):
        if words.numel():
            outputs = [words, scale] if zero is None else [words, scale, zero]
            launcher(scheme, rows, columns, dtype).start([weight.contiguous() for weight in weights], outputs, bad)
        else:
            scale.fill_(torch.finfo(stored).eps)
            if zero is not None:
                zero.zero_()
        if zeros is not None and zeros.numel():
            pack_zeros[triton.cdiv(zeros[0].numel(), _TILE), count](zero, zeros, rows, groups, TILE=_TILE)
    each: Iterable[Tensor | None] = [None] * count if zeros is None else zeros.unbind()
    return (Packed(*parts) for parts in zip(words.unbind(), scale.unbind(), each, strict=True))
