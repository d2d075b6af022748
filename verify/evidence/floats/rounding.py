"""Measures the error of weights in 8-bit and 4-bit floats (FP8, MXFP8, MXFP4, NVFP4) against their source.

A stored weight is a code times a scale, which is one step. The error of rounding to the nearest code is at most half
the distance between codes: with m bits of mantissa, 2^(e - m - 1) steps for a code of at least 2^e, where e is at least
that of the smallest normal number. For float8_e4m3fn (m = 3, normals from 2^-6) it is 2^-4 of a power of two and 2^-10
steps below 2^-6; for E2M1 (m = 1, normals from 1) it is a quarter of a power of two, and a quarter of a step below 1.

Weights beyond the largest code are clipped:
- FP8: the scale is absmax/448 or larger, which clips nothing. A search (`observer` mse) shrinks the range to no less
  than 0.8 of itself. Source: compressed-tensors `calculate_qparams`, llm-compressor `observers/mse.py`.
- MXFP4: the power of two below absmax is 4 steps, so weights of up to 8 steps become 6. MXFP8: it is 256 steps, so
  weights of up to 512 steps become 448. Rounding up clips nothing. Source: OCP Microscaling Formats 1.0, section 6.3.
- NVFP4: scales are float8_e4m3fn with an error of 1/16 of themselves, or shrunk by a search. Groups below 2^-19 of the
  tensor's largest weight have no scale and become zero.

Source, quotient and scale may each be rounded to bfloat16, each time by 2^-8 of a weight. All errors together are 7.5 %
of a weight: a scale with an error of 25 % is found. Source: OCP 8-bit Floating Point Specification 1.0, table 1;
DeepSeek-V3 `inference/kernel.py`, `act_quant_kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.formats.dequantize import format_of
from ckptkit.quant.formats.floats.layout import E4M3, Layout
from ckptkit.quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV
from ckptkit.quant.formats.release import Floats, Release, StoredWeight, step_of
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.both_sides import common_groups, threads
from ckptkit.verify.evidence.compare import rows_named
from ckptkit.verify.evidence.expected import is_quantized, weights_of
from ckptkit.verify.evidence.reading import as_hf_view, source_as_hf

if TYPE_CHECKING:
    from torch import Tensor

_SEARCHED = 0.8  # the smallest part of its range that a search leaves
_ROUNDED = 3 * 2.0**-8  # by bfloat16
_EXPONENT = 0x7F800000  # of a float32
_LOST = 2.0**-16  # of NVFP4's largest weight: 6 x 2^-10 of 6 x 448 steps, with a margin for a shared scale
_PIECE = 1 << 24  # weights that are compared at a time


@dataclass(frozen=True)
class FloatGrid:
    """The numbers of a format, in steps."""

    mantissa: int  # bits
    normal: float  # the smallest normal number
    largest: float
    reach: float  # the largest weight that may be clipped to `largest`
    lost: float = 0.0  # the largest weight that may become zero, as a part of the tensor's largest


@dataclass(frozen=True)
class FloatRounding:
    """The error of one weight against its source."""

    wrong: int  # elements with a larger error than rounding explains
    numel: int
    times: float  # the worst error, as a multiple of the permitted one
    rows: str  # rows with wrong elements; empty for all rows
    changed: int = 0  # elements of FP8 by powers of two that are not exactly those of an MXFP4 source
    zeroed: int = 0  # changed elements that became zero
    first: str = ""  # the place and both values of the first changed element


@dataclass(frozen=True)
class FloatWeights:
    """The weights in low-precision floats that can be compared with a plain source, by headers."""

    words: str = ""  # the format, for people
    judged: frozenset[str] = frozenset()  # HF names, with one tensor an expert; 8-bit floats if `unread` is set
    parts: frozenset[str] = frozenset()  # their tensors
    broken: Mapping[str, str] = field(default_factory=dict)  # faults of parts that do not fit, by stored name
    unread: str | None = None  # the reason if the format is not supported, and nothing can be compared
    stored: Mapping[str, StoredWeight] = field(default_factory=dict)  # by stored name of `judged`


@once
def float_weights(subject: Subject) -> FloatWeights:
    """The weights in floats of 8 or 4 bits that are plain in the source. Raises CkptkitError."""
    if subject.kind == "megatron" or subject.source is None or is_quantized(subject.source.config):
        return FloatWeights()
    checkpoint = subject.checkpoint
    if not is_quantized(checkpoint.config):
        return FloatWeights()
    source = source_as_hf(subject, checkpoint.specs)
    try:
        form = format_of(checkpoint.config)
    except CkptkitError as error:
        return _unread(checkpoint, source, error.message)
    if not isinstance(form, Floats):
        return FloatWeights()
    weights, broken = _valid_weights(checkpoint, form)
    codes = _codes(subject, weights, 0)
    stored = {name: _stored(codes, name) for name in codes.specs}
    skipped = {stored[name] for name, spec in codes.specs.items() if not _comparable(spec, source.specs.get(name))}
    judged = frozenset(name for name, home in stored.items() if home in weights and home not in skipped)
    parts = {part for name in judged for part in weights[stored[name]].needed}
    unused = {name for name in checkpoint.specs if name.endswith(form.unused)} if form.unused else set()
    return FloatWeights(form.words, judged, frozenset(parts | unused), broken, None, weights)


@once
def float_rounding_of(subject: Subject) -> dict[str, FloatRounding]:
    """The error of each of `float_weights`. Raises CkptkitError if the checkpoint or its source cannot be read."""
    weights = float_weights(subject)
    if not weights.judged or weights.unread is not None:
        return {}
    codes, scales = (_codes(subject, weights.stored, part) for part in (0, 1))
    source = source_as_hf(subject, subject.checkpoint.specs)
    is_searched = "mse" in str(weights_of(subject.checkpoint.config).get("observer"))
    grids = {name: _grid(weights.stored[_stored(codes, name)].layout, is_searched) for name in weights.judged}
    judged = ([name for name in group if name in weights.judged] for group in common_groups(codes, source))
    groups = list(filter(None, judged))
    narrow = set[str]()  # from MXFP4: FP8 has its numbers exactly if the scales are near enough
    if isinstance(subject.source, View):
        steps = {name: subject.source.step(_stored(source, name)) for name in grids if grids[name].mantissa == 3}
        narrow = {name for name, step in steps.items() if step.label == "dequantize MXFP4"}

    def measure(names: Sequence[str]) -> dict[str, FloatRounding]:
        code, scale, original = codes.read(names), scales.read(names), source.read(names)
        rounding = {name: float_rounding(code[name], scale[name], original[name], grids[name]) for name in names}
        for name in narrow.intersection(names):
            changed, zeroed, first = _changed(code[name].float(), scale[name].float(), original[name])
            rounding[name] = replace(rounding[name], changed=changed, zeroed=zeroed, first=first)
        return rounding

    with threads(max(sum(2 * codes.specs[name].nbytes for name in names) for names in groups)) as pool:
        return {name: one for part in pool.map(measure, groups) for name, one in part.items()}


def _unread(checkpoint: Checkpoint, source: Checkpoint, reason: str) -> FloatWeights:
    specs = {name: spec for name, spec in checkpoint.specs.items() if spec.dtype.startswith("float8")}
    judged = frozenset(name for name, spec in specs.items() if _comparable(spec, source.specs.get(name)))
    endings = (FP8_SCALE_INV, FP8_SCALE)
    parts = {name + ending for name in judged for ending in endings if name + ending in checkpoint.specs}
    return FloatWeights(judged=judged, parts=judged | parts, unread=reason)


def _comparable(spec: TensorSpec, original: TensorSpec | None) -> bool:
    """Whether the source has floats of this shape; CK202 reports a source of another size."""
    return original is not None and original.shape == spec.shape and original.dtype in COMPUTED


def _valid_weights(checkpoint: Checkpoint, form: Floats) -> tuple[dict[str, StoredWeight], dict[str, str]]:
    """The weights with parts that fit, by name, and the faults of the remaining ones, by the name of their codes."""
    release, weights, broken = Release.of(checkpoint, "the checkpoint"), dict[str, StoredWeight](), dict[str, str]()
    for stored in form.weights(release.specs):
        try:
            step_of(release, stored)
            weights[stored.name] = stored
        except CkptkitError as error:
            broken[stored.codes.name] = error.message
    return weights, broken


def _codes(subject: Subject, weights: Mapping[str, StoredWeight], part: int) -> Checkpoint:
    """The codes (`part` 0), or the scale of each weight (1), under HF names with one tensor an expert; all floats."""
    checkpoint = subject.checkpoint
    release = Release.of(checkpoint, str(subject.path))
    steps = tuple(_part_step(step_of(release, stored), stored, part) for stored in weights.values())
    consumed = {name for stored in weights.values() for name in stored.needed}
    copies = tuple(identity(spec) for name, spec in checkpoint.specs.items() if name not in consumed)
    plan = Plan((*steps, *copies), checkpoint.specs, where=str(subject.path), config=checkpoint.config)
    return as_hf_view(View(checkpoint, plan), subject.path)


def _part_step(step: Step, stored: StoredWeight, part: int) -> Step:
    (output,) = step.outputs
    layout, shape = stored.layout, stored.shape
    assert shape is not None  # `step_of` raised otherwise

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        from ckptkit.quant.formats.floats.decode import factors, spread, values

        if part == 0:
            result = values(layout, tensors[0])
        else:
            second = tensors[2] if tensors[2:] else None
            result = spread(factors(layout, tensors[1], second, shape), layout.block, shape)
        return [result.transpose(-1, -2).contiguous() if layout.axes == "groups" else result]

    return Step(step.inputs, (TensorSpec(output.name, output.shape, "float32"),), run, step.label)


def _stored(view: Checkpoint, name: str) -> str:
    """The stored name of a matrix: its own, or that of its layer's fused experts."""
    step = view.step(name) if isinstance(view, View) else None
    return step.inputs[0] if step is not None and step.label == "unfuse" else name


def _grid(layout: Layout, is_searched: bool) -> FloatGrid:
    if layout.is_mxfp8:
        return FloatGrid(3, 2.0**-6, 448.0, 512.0)
    if layout.number == E4M3:
        return FloatGrid(3, 2.0**-6, 448.0, 448.0 / _SEARCHED if is_searched else 448.0)
    return FloatGrid(1, 1.0, 6.0, 8.0, _LOST if layout.second else 0.0)


def float_rounding(codes: Tensor, scales: Tensor, original: Tensor, grid: FloatGrid) -> FloatRounding:
    """The error of `codes` times `scales` against `original`, all floats [rows, columns]."""
    wrong, times, rows = 0, 0.0, set[int]()
    columns = codes.shape[-1]
    lost = grid.lost * float(scales.max()) * grid.largest if grid.lost and scales.numel() else 0.0
    height = max(1, _PIECE // max(1, columns))
    for begin in range(0, len(codes), height):
        piece = slice(begin, begin + height)
        error, allowed = _errors(codes[piece].float(), scales[piece].float(), original[piece], grid, lost)
        bad = ~(error <= allowed)  # also where one is NaN
        if count := int(bad.sum()):
            wrong += count
            rows |= {begin + row for row in bad.any(dim=1).nonzero().flatten().tolist()}
            times = max(times, float((error[bad] / allowed[bad]).nan_to_num(math.inf).max()))
    return FloatRounding(wrong, codes.numel(), times, rows_named(rows) if 0 < len(rows) < len(codes) else "")


def _changed(codes: Tensor, scales: Tensor, original: Tensor) -> tuple[int, int, str]:
    """Counts elements that are not exactly the source's, and zeros among them, and describes the first."""
    import torch

    if not bool((torch.frexp(scales)[0] == 0.5).all()):  # other scales than powers of two round every element
        return 0, 0, ""
    stored, expected = codes * scales, original.float()
    unequal = stored != expected
    if not bool(unequal.any()):
        return 0, 0, ""
    row, column = unequal.nonzero()[0].tolist()
    first = f"[{row}, {column}] was {expected[row, column]:g} and is {stored[row, column]:g}"
    return int(unequal.sum()), int((unequal & (codes == 0)).sum()), first


def _errors(codes: Tensor, scales: Tensor, original: Tensor, grid: FloatGrid, lost: float) -> tuple[Tensor, Tensor]:
    """The error of each weight, and the largest permitted one; float32 [rows, columns]."""
    import torch

    weight = original.float()
    end, reach = grid.largest * scales, grid.reach * scales
    clipped = torch.where(weight.abs() <= reach, weight.clamp(-end, end), weight)
    # Clearing the bits of the mantissa gives the power of two below a number.
    power = (codes.abs().clamp(min=grid.normal).view(torch.int32) & _EXPONENT).view(torch.float32)
    half = power * 2.0 ** -(grid.mantissa + 1)
    return (codes * scales - clipped).abs(), half * scales.abs() + _ROUNDED * weight.abs() + lost
