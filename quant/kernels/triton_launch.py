"""Launches the Triton kernels for hundreds of matrices at once and returns packed tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats.grids import check, not_finite
from quant.formats.packing import Packed
from quant.formats.scheme import CODES_PER_WORD, QuantScheme
from quant.kernels.triton_kernel import channelwise, grouped, pack_zeros
from quant.kernels.triton_pairs import paired

_TILE, _WARPS = 1024, 1  # weights a program takes; a single warp never waits for others
_PAIRED_TILE, _PAIRED_WARPS = 2048, 2
_ALIGNMENT = 16  # bytes of one load
_FIRST, _MAX_LAUNCH = 64, 1024  # matrices of the first and of the largest launch: their number doubles
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Launcher:
    """Starts `kernel` for non-empty matrices of one size and dtype. `sizes` and `options` are its arguments."""

    kernel: Any
    blocks: int
    sizes: tuple[int, ...]
    options: Mapping[str, Any]

    def start(self, weights: Sequence[Tensor], words: Tensor, scale: Tensor, zero: Tensor | None, bad: Tensor) -> None:
        """Quantizes contiguous matrices on the current stream; the current device must be theirs.

        Writes `words`, `scale` and (asymmetric only) `zero` matrix after matrix. Sets `bad`, int32, to 1 for each
        matrix with a scale that is not finite.
        """
        places = _places(weights)
        if int(np.bitwise_or.reduce(places)) % _ALIGNMENT:
            # A clone may be freed once the kernel is started: whatever reuses its memory runs after the kernel.
            weights = [weight.clone() if weight.data_ptr() % _ALIGNMENT else weight for weight in weights]
            places = _places(weights)
        # Does not wait for earlier launches: unpinned memory is copied aside before the call returns.
        table = torch.from_numpy(places).to(words.device, non_blocking=True)
        self.kernel[self.blocks, len(weights)](table, words, scale, zero, bad, *self.sizes, **self.options)


def _places(weights: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(map(Tensor.data_ptr, weights), np.int64, len(weights))


def launcher(scheme: QuantScheme, rows: int, columns: int, dtype: torch.dtype) -> Launcher:
    """Returns the launcher for matrices [rows, columns]. With groups only rows x columns matters."""
    stored = scheme.scale_dtype or dtype
    in_pairs = scheme.group_size and dtype == stored == torch.bfloat16
    formats = {"WEIGHT": _TYPES[dtype], "STORED": _TYPES[stored], "WIDE": _TYPES[torch.promote_types(dtype, stored)]}
    tile, warps = (_PAIRED_TILE, _PAIRED_WARPS) if in_pairs else (_TILE, _WARPS)
    grid = {"MINMAX": scheme.grid == "minmax", "ASYMMETRIC": not scheme.symmetric, "EPS": torch.finfo(stored).eps}
    options = grid | {"TILE": tile, "num_warps": warps} | ({} if in_pairs else formats)
    if scheme.group_size is None:
        return Launcher(channelwise, rows, (rows, columns), options)
    groups = rows * scheme.groups(columns)
    return Launcher(
        paired if in_pairs else grouped,
        triton.cdiv(groups, tile // scheme.group_size),
        (groups,),
        options | {"GROUP": scheme.group_size},
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

    A launch takes matrices of one shape and dtype. One wait for the GPU at the end checks that all scales are finite.
    Raises CkptkitError as `quantize_pack` does.
    """
    packed: dict[int, Packed] = {}
    bad = torch.zeros(len(weights), dtype=torch.int32, device=weights[0].device)
    for members in _launches(weights):
        check(weights[members[0]], scheme, names[members[0]])
        packed |= zip(members, _launch([weights[index] for index in members], scheme, bad[len(packed) :]), strict=True)
    wrong = [index for index, flag in zip(packed, bad.tolist(), strict=True) if flag]
    if wrong:
        first = min(wrong)
        raise not_finite(weights[first], packed[first].scale.dtype, names[first])
    return [packed[index] for index in range(len(weights))]


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
            launcher(scheme, rows, columns, dtype).start(
                [weight.contiguous() for weight in weights], words, scale, zero, bad
            )
        else:
            scale.fill_(torch.finfo(stored).eps)
            if zero is not None:
                zero.zero_()
        if zeros is not None and zeros.numel():
            pack_zeros[triton.cdiv(zeros[0].numel(), _TILE), count](zero, zeros, rows, groups, TILE=_TILE)
    each: Iterable[Tensor | None] = [None] * count if zeros is None else zeros.unbind()
    return (Packed(*parts) for parts in zip(words.unbind(), scale.unbind(), each, strict=True))
