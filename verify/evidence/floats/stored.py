"""Finds the weights of an HF checkpoint in 8-bit and 4-bit floats by headers, and reads their scales."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.dequantize import floats_of
from ckptkit.quant.formats.release import Floats, StoredWeight, wrong_scale
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.extremes import digest_of

if TYPE_CHECKING:
    from torch import Tensor

_MANY, _SAMPLE = 12, 4096  # distinct scales among a sample


@dataclass(frozen=True)
class FloatScales:
    """The scales of one weight."""

    stored: StoredWeight
    values: int
    not_finite: int = 0
    zero_scale_blocks: int = 0  # blocks with nonzero codes and a scale of zero
    negative: int = 0
    above: int = 0  # powers of two that make weights infinite in bfloat16
    unrounded: int = 0  # numbers other than powers of two
    median: float | None = None  # of finite nonzero scales, combined with the tensor's own scale
    second: float | None = None
    inputs: dict[str, float] = field(default_factory=dict)  # by name; one that is not finite and positive, if any
    digest: bytes = b""  # of many scales other than powers of two: two weights do not share them by chance
    nbytes: int = 0


@once
def stored_floats_of(subject: Subject) -> tuple[Floats | None, list[StoredWeight]]:
    """The formats of an HF checkpoint's weights in floats, None without any or if unsupported, and those weights."""
    floats = None
    with suppress(CkptkitError):
        floats = None if subject.kind == "megatron" else floats_of(subject.hf_files.config)
    return floats, [] if floats is None else list(floats.weights(subject.hf_files.specs))


@once
def parts_in_floats(subject: Subject) -> frozenset[str]:
    """The tensors that store weights in floats of 8 and 4 bits: codes and scales."""
    return frozenset(part for one in stored_floats_of(subject)[1] for part in (*one.needed, *one.inputs))


@once
def scales_in_floats(subject: Subject) -> frozenset[str]:
    """The scales of weights in floats of 8 and 4 bits."""
    return frozenset(part for one in stored_floats_of(subject)[1] for part in (*one.needed[1:], *one.inputs))


@once
def float_scales_of(subject: Subject) -> list[FloatScales]:
    """Reads the scales of every weight that has valid ones. Raises CkptkitError."""
    checkpoint, (_, weights) = subject.checkpoint, stored_floats_of(subject)
    return [_scales_of(checkpoint, one) for one in weights if wrong_scale(one, checkpoint.specs) is None]


def _scales_of(checkpoint: Checkpoint, stored: StoredWeight) -> FloatScales:
    import torch

    from ckptkit.quant.formats.floats.decode import as_float

    names = [stored.scale, *([stored.second] if stored.second else []), *stored.inputs]
    read = checkpoint.read([name for name in names if name in checkpoint.specs])
    raw = read[stored.scale]
    scales = as_float(raw)
    finite = scales.isfinite()
    mantissa, _ = torch.frexp(scales)
    exponents = raw.view(torch.uint8) if raw.dtype in (torch.uint8, torch.float8_e8m0fnu) else None
    second = _worst(read[stored.second]) if stored.second in read else None
    sizes = scales[finite & (scales != 0)].abs()
    median = float(sizes.median()) if sizes.numel() else None
    if median is not None and second:
        median = median / second if stored.layout.divides else median * second
    zero = scales == 0
    unrounded = int((finite & ~zero & (mantissa.abs() != 0.5)).sum())
    is_distinctive = unrounded >= _MANY and len(set(scales.flatten()[:_SAMPLE].tolist())) >= _MANY
    return FloatScales(
        stored,
        scales.numel(),
        int((~finite).sum()),
        _zero_scale_blocks(checkpoint, stored, zero) if bool(zero.any()) else 0,
        int((scales < 0).sum()),
        int(((exponents > stored.layout.max_exponent) & finite).sum()) if exponents is not None else 0,
        unrounded,
        median,
        second,
        {name: _worst(read[name]) for name in stored.inputs if name in read and read[name].is_floating_point()},
        digest_of(raw) if is_distinctive else b"",
        sum(tensor.nbytes for tensor in read.values()),
    )


def _worst(tensor: Tensor) -> float:
    """The first number that is not finite and positive, else the first number."""
    values = tensor.float().flatten()
    bad = values[~(values.isfinite() & (values > 0))]
    return float((bad if bad.numel() else values)[0]) if values.numel() else float("nan")


def _zero_scale_blocks(checkpoint: Checkpoint, stored: StoredWeight, zero: Tensor) -> int:
    """Counts blocks with nonzero codes and a scale of zero; `zero` in the order of the scales."""
    import torch

    from ckptkit.quant.formats.floats.decode import values

    layout, shape = stored.layout, stored.shape
    assert shape is not None  # its scale fits
    numbers = values(layout, checkpoint.read([stored.codes.name])[stored.codes.name]).abs().nan_to_num(torch.inf)
    height, width = layout.block[0] or shape[-2], layout.block[1] or shape[-1]
    grid = layout.grid(shape)
    padded = torch.nn.functional.pad(numbers, (0, grid[-1] * width - shape[-1], 0, grid[-2] * height - shape[-2]))
    largest = padded.reshape(*grid[:-1], height, grid[-1], width).amax((-3, -1))
    return int(((largest > 0) & zero.reshape(grid)).sum())
