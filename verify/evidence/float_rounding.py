"""Measures how far weights in 8-bit and 4-bit floats (FP8, MXFP4) are off their source.

A stored weight is a code times a scale. Rounding to the nearest code is off by at most half the distance between codes:
with m bits of mantissa, 2^(e - m - 1) steps for a code of at least 2^e, where one step is the scale and e is at least
that of the smallest normal number. Of float8_e4m3fn (m = 3, normals from 2^-6) that is 2^-4 of a power of two and 2^-10
steps below 2^-6; of E2M1 (m = 1, normals from 1) it is a quarter of one, and a quarter of a step below 1.

Beyond the largest code weights are clipped:
- FP8 has the scale absmax/448, so that nothing is, or a larger one. A search (`observer` mse) shrinks the range to no
  less than 0.8 of itself. Source: compressed-tensors `calculate_qparams`, llm-compressor `observers/mse.py`.
- MXFP4 has the power of two below absmax as 4 steps, so weights of up to 8 steps become 6.
  Source: OCP Microscaling Formats 1.0, section 6.3.

Source, quotient and scale may each be rounded to bfloat16 on the way, which moves a weight by 2^-8 of itself each time.
All of this together is 7.5 % of a weight, so that a scale that is 25 % off shows.
Source: OCP 8-bit Floating Point Specification 1.0, table 1; DeepSeek-V3 `inference/kernel.py`, `act_quant_kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.core.specs import TensorSpec
from quant.formats.dequantize import format_of
from quant.formats.fp8 import Fp8, codes_and_scales
from quant.formats.mxfp4 import Mxfp4
from quant.formats.mxfp4 import codes_and_scales as mxfp4_codes_and_scales
from quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV, MXFP4_BLOCKS, MXFP4_SCALES
from quant.formats.release import Release
from verify.evidence.expected import is_quantized, weights_of
from verify.evidence.reading import threads
from verify.evidence.subject import Subject
from verify.evidence.values import as_hf_view, common_groups, rows_named, source_as_hf

if TYPE_CHECKING:
    from torch import Tensor

_SEARCHED = 0.8  # the smallest part of its range that a search leaves
_ROUNDED = 3 * 2.0**-8  # by bfloat16
_EXPONENT = 0x7F800000  # of a float32
_PIECE = 1 << 24  # weights that are compared at a time


@dataclass(frozen=True)
class FloatGrid:
    """The numbers that a format has, in steps."""

    mantissa: int  # bits
    normal: float  # the smallest normal number
    largest: float
    reach: float  # the largest weight that may be clipped to `largest`


@dataclass(frozen=True)
class FloatRounding:
    """How far one weight is off its source."""

    wrong: int  # elements further off than rounding explains
    numel: int
    times: float  # the worst error, as a multiple of what is allowed
    rows: str  # rows with wrong elements; empty where that is every row


@dataclass(frozen=True)
class FloatWeights:
    """The weights of a checkpoint in FP8 or MXFP4 that its plain source can judge, by headers."""

    words: str = ""  # the format, for people
    judged: frozenset[str] = frozenset()  # HF names, with one tensor an expert; 8-bit floats where `unread` is set
    parts: frozenset[str] = frozenset()  # the tensors that hold them
    broken: Mapping[str, str] = field(default_factory=dict)  # what is wrong with parts that do not fit, by stored name
    unread: str | None = None  # why none can be judged, where the format is not supported
    grid: FloatGrid | None = None
    steps: tuple[Step, ...] = ()


def float_weights(subject: Subject) -> FloatWeights:
    """What is stored in FP8 or MXFP4 here and plain in the source. Raises CkptkitError where one cannot be opened."""
    if subject.is_megatron or subject.source is None or is_quantized(subject.source.config):
        return FloatWeights()
    checkpoint = subject.checkpoint
    if not is_quantized(checkpoint.config):
        return FloatWeights()
    source = source_as_hf(subject, checkpoint.specs)
    try:
        form = format_of(checkpoint.config)
    except CkptkitError as error:
        return _unread(checkpoint, source, error.message)
    if not isinstance(form, (Fp8, Mxfp4)):
        return FloatWeights()
    steps, broken = _steps(checkpoint, form)
    here = _codes(subject, steps, 0)
    of_steps = {step.outputs[0].name: step for step in steps}
    comparable = {name for name, spec in here.specs.items() if _comparable(spec, source.specs.get(name))}
    stored = {name: _stored(here, name) for name in here.specs}
    left = {stored[name] for name in here.specs if name not in comparable}
    judged = frozenset(name for name in comparable if stored[name] in of_steps and stored[name] not in left)
    parts = {part for name in judged for part in of_steps[stored[name]].inputs}
    unused = {name for name in checkpoint.specs if name.endswith(form.unused)} if form.unused else set()
    return FloatWeights(form.words, judged, frozenset(parts | unused), broken, None, _grid(form, checkpoint), steps)


def float_rounding_of(subject: Subject) -> dict[str, FloatRounding]:
    """How far each of `float_weights` is off its source. Raises CkptkitError where one of the two cannot be read."""
    found = subject.once(float_weights)
    if found.grid is None or not found.judged:
        return {}
    codes, scales = (_codes(subject, found.steps, part) for part in (0, 1))
    source = source_as_hf(subject, subject.checkpoint.specs)
    groups = [
        names for group in common_groups(codes, source) if (names := [name for name in group if name in found.judged])
    ]
    largest = max(sum(2 * codes.specs[name].nbytes for name in names) for names in groups)
    with threads(largest) as pool:
        several = pool.map(partial(_rounding, codes, scales, source, found.grid), groups)
        return {name: one for part in several for name, one in part.items()}


def _unread(checkpoint: Checkpoint, source: Checkpoint, reason: str) -> FloatWeights:
    """Those 8-bit floats, with their scales, that the source has as floats."""
    judged = frozenset(
        name
        for name, spec in checkpoint.specs.items()
        if spec.dtype.startswith("float8") and _comparable(spec, source.specs.get(name))
    )
    endings = (FP8_SCALE_INV, FP8_SCALE)
    parts = {name + ending for name in judged for ending in endings if name + ending in checkpoint.specs}
    return FloatWeights(judged=judged, parts=judged | parts, unread=reason)


def _comparable(spec: TensorSpec, original: TensorSpec | None) -> bool:
    """Whether the source has floats of this shape: a source of another size is another model, as CK202 says."""
    return original is not None and original.shape == spec.shape and original.dtype in COMPUTED


def _steps(checkpoint: Checkpoint, form: Fp8 | Mxfp4) -> tuple[tuple[Step, ...], dict[str, str]]:
    """What dequantizes each weight whose parts fit, and what is wrong with the others."""
    whole, steps, broken = Release.of(checkpoint, "the checkpoint"), list[Step](), dict[str, str]()
    for name, spec in whole.specs.items():
        if isinstance(form, Mxfp4) and name.endswith(MXFP4_BLOCKS):
            parts = [name, name.removesuffix(MXFP4_BLOCKS) + MXFP4_SCALES]
        elif isinstance(form, Fp8) and spec.dtype == "float8_e4m3fn":
            parts = [name, *(name + ending for ending in form.scales)]
        else:
            continue
        known = {part: whole.specs[part] for part in parts if part in whole.specs}
        try:
            steps += form.steps(Release(whole.where, known, whole.files))
        except CkptkitError as error:
            broken[name] = error.message
    return tuple(steps), broken


def _codes(subject: Subject, steps: Sequence[Step], part: int) -> Checkpoint:
    """The codes (`part` 0), or the scale of each weight (1), under HF names with one tensor an expert; all floats."""
    checkpoint = subject.checkpoint
    form = format_of(checkpoint.config)
    made = tuple(_part_step(step, form, part) for step in steps)
    taken = {name for step in steps for name in step.inputs}
    rest = tuple(identity(spec) for name, spec in checkpoint.specs.items() if name not in taken)
    plan = Plan((*made, *rest), checkpoint.specs, where=str(subject.path), config=checkpoint.config)
    return as_hf_view(View(checkpoint, plan), subject.path)


def _part_step(step: Step, form: Any, part: int) -> Step:
    (output,) = step.outputs

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        both = (
            codes_and_scales(tensors[0], tensors[1], form.block)
            if isinstance(form, Fp8)
            else mxfp4_codes_and_scales(tensors[0], tensors[1])
        )
        return [both[part]]

    dtype = "float32" if isinstance(form, Fp8) else "bfloat16"
    return Step(step.inputs, (TensorSpec(output.name, output.shape, dtype),), run, step.label)


def _stored(here: Checkpoint, name: str) -> str:
    """The name of the matrix that holds this one: itself, or that of a layer's fused experts."""
    if not isinstance(here, View):
        return name
    step = here.step(name)
    return step.inputs[0] if step.label == "unfuse" else name


def _grid(form: Fp8 | Mxfp4, checkpoint: Checkpoint) -> FloatGrid:
    if isinstance(form, Mxfp4):
        return FloatGrid(1, 1.0, 6.0, 8.0)
    searched = "mse" in str(weights_of(checkpoint.config).get("observer"))
    return FloatGrid(3, 2.0**-6, 448.0, 448.0 / _SEARCHED if searched else 448.0)


def _rounding(
    codes: Checkpoint, scales: Checkpoint, source: Checkpoint, grid: FloatGrid, names: Sequence[str]
) -> dict[str, FloatRounding]:
    code, scale, original = codes.read(names), scales.read(names), source.read(names)
    return {name: float_rounding(code[name], scale[name], original[name], grid) for name in names}


def float_rounding(codes: Tensor, scales: Tensor, original: Tensor, grid: FloatGrid) -> FloatRounding:
    """How far `codes` times `scales` are off `original`, all [rows, columns] and floats."""
    wrong, times, rows = 0, 0.0, set[int]()
    columns = codes.shape[-1]
    height = max(1, _PIECE // max(1, columns))
    for begin in range(0, len(codes), height):
        piece = slice(begin, begin + height)
        error, allowed = _errors(codes[piece].float(), scales[piece].float(), original[piece], grid)
        bad = ~(error <= allowed)  # also where one is NaN
        if count := int(bad.sum()):
            wrong += count
            rows |= {begin + row for row in bad.any(dim=1).nonzero().flatten().tolist()}
            worst = (error[bad] / allowed[bad]).nan_to_num(math.inf).max()
            times = max(times, float(worst))
    named = rows_named(rows) if 0 < len(rows) < len(codes) else ""
    return FloatRounding(wrong, codes.numel(), times, named)


def _errors(codes: Tensor, scales: Tensor, original: Tensor, grid: FloatGrid) -> tuple[Tensor, Tensor]:
    """How far each weight is off, and how far it may be; float32 [rows, columns]."""
    import torch

    weight = original.float()
    end, reach = grid.largest * scales, grid.reach * scales
    clipped = torch.where(weight.abs() <= reach, weight.clamp(-end, end), weight)
    # The power of two below a number is the number without the bits of its mantissa.
    power = (codes.abs().clamp(min=grid.normal).view(torch.int32) & _EXPONENT).view(torch.float32)
    half = power * 2.0 ** -(grid.mantissa + 1)
    return (codes * scales - clipped).abs(), half * scales + _ROUNDED * weight.abs()
