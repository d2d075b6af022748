"""Measures how far weights in 8-bit and 4-bit floats (FP8, MXFP8, MXFP4, NVFP4) are off their source.

A stored weight is a code times a scale. Rounding to the nearest code is off by at most half the distance between codes:
with m bits of mantissa, 2^(e - m - 1) steps for a code of at least 2^e, where one step is the scale and e is at least
that of the smallest normal number. Of float8_e4m3fn (m = 3, normals from 2^-6) that is 2^-4 of a power of two and 2^-10
steps below 2^-6; of E2M1 (m = 1, normals from 1) it is a quarter of one, and a quarter of a step below 1.

Beyond the largest code weights are clipped:
- FP8 has the scale absmax/448, so that nothing is, or a larger one. A search (`observer` mse) shrinks the range to no
  less than 0.8 of itself. Source: compressed-tensors `calculate_qparams`, llm-compressor `observers/mse.py`.
- MXFP4 has the power of two below absmax as 4 steps, so weights of up to 8 steps become 6; MXFP8 has it as 256, so
  weights of up to 512 steps become 448. Writers that round up clip nothing.
  Source: OCP Microscaling Formats 1.0, section 6.3.
- NVFP4's scales are float8_e4m3fn themselves: one is off by 1/16 of itself, or a search shrinks it. Groups that are
  2^-19 of the tensor's largest weight have no scale at all, and become zero.

Source, quotient and scale may each be rounded to bfloat16 on the way, which moves a weight by 2^-8 of itself each time.
All of this together is 7.5 % of a weight, so that a scale that is 25 % off shows.
Source: OCP 8-bit Floating Point Specification 1.0, table 1; DeepSeek-V3 `inference/kernel.py`, `act_quant_kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
_LOST = 2.0**-16  # of NVFP4's largest weight: 6 x 2^-10 of 6 x 448 steps, with a margin for a scale that is shared
_PIECE = 1 << 24  # weights that are compared at a time


@dataclass(frozen=True)
class FloatGrid:
    """The numbers that a format has, in steps."""

    mantissa: int  # bits
    normal: float  # the smallest normal number
    largest: float
    reach: float  # the largest weight that may be clipped to `largest`
    lost: float = 0.0  # the largest weight that may become zero, as a part of the tensor's largest


@dataclass(frozen=True)
class FloatRounding:
    """How far one weight is off its source."""

    wrong: int  # elements further off than rounding explains
    numel: int
    times: float  # the worst error, as a multiple of what is allowed
    rows: str  # rows with wrong elements; empty where that is every row
    changed: int = 0  # elements of FP8 by powers of two that are not exactly those of an MXFP4 source
    zeroed: int = 0  # of these, those that became zero
    first: str = ""  # where the first of these is, what it was and what it is


@dataclass(frozen=True)
class FloatWeights:
    """The weights of a checkpoint in low-precision floats that its plain source can judge, by headers."""

    words: str = ""  # the format, for people
    judged: frozenset[str] = frozenset()  # HF names, with one tensor an expert; 8-bit floats where `unread` is set
    parts: frozenset[str] = frozenset()  # the tensors that hold them
    broken: Mapping[str, str] = field(default_factory=dict)  # what is wrong with parts that do not fit, by stored name
    unread: str | None = None  # why none can be judged, where the format is not supported
    stored: Mapping[str, StoredWeight] = field(default_factory=dict)  # by the name of the tensor that `judged` is of


@once
def float_weights(subject: Subject) -> FloatWeights:
    """What is stored in floats of 8 or 4 bits here and plain in the source.

    Raises CkptkitError where one cannot be opened.
    """
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
    if not isinstance(form, Floats):
        return FloatWeights()
    found, broken = _sound(checkpoint, form)
    here = _codes(subject, found, 0)
    comparable = {name for name, spec in here.specs.items() if _comparable(spec, source.specs.get(name))}
    whole = {name: _stored(here, name) for name in here.specs}
    left = {whole[name] for name in here.specs if name not in comparable}
    judged = frozenset(name for name in comparable if whole[name] in found and whole[name] not in left)
    parts = {part for name in judged for part in found[whole[name]].needed}
    unused = {name for name in checkpoint.specs if name.endswith(form.unused)} if form.unused else set()
    return FloatWeights(form.words, judged, frozenset(parts | unused), broken, None, found)


@once
def float_rounding_of(subject: Subject) -> dict[str, FloatRounding]:
    """How far each of `float_weights` is off its source. Raises CkptkitError where one of the two cannot be read."""
    found = float_weights(subject)
    if not found.judged or found.unread is not None:
        return {}
    codes, scales = (_codes(subject, found.stored, part) for part in (0, 1))
    source = source_as_hf(subject, subject.checkpoint.specs)
    searched = "mse" in str(weights_of(subject.checkpoint.config).get("observer"))
    grids = {name: _grid(found.stored[_stored(codes, name)].layout, searched) for name in found.judged}
    groups = [
        names for group in common_groups(codes, source) if (names := [name for name in group if name in found.judged])
    ]
    largest = max(sum(2 * codes.specs[name].nbytes for name in names) for names in groups)
    narrow: frozenset[str] = frozenset()
    if isinstance(
        stored := subject.source, View
    ):  # MXFP4, whose numbers FP8 holds exactly if its scales are near enough
        eight_bits = [name for name, grid in grids.items() if grid.mantissa == 3]
        labels = {name: stored.step(_stored(source, name)).label for name in eight_bits}
        narrow = frozenset(name for name, label in labels.items() if label == "dequantize MXFP4")
    with threads(largest) as pool:
        several = pool.map(partial(_rounding, codes, scales, source, grids, narrow), groups)
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


def _sound(checkpoint: Checkpoint, form: Floats) -> tuple[dict[str, StoredWeight], dict[str, str]]:
    """The weights whose parts fit, by name, and what is wrong with the others, by the name of their codes."""
    whole, found, broken = Release.of(checkpoint, "the checkpoint"), dict[str, StoredWeight](), dict[str, str]()
    for stored in form.weights(whole.specs):
        try:
            step_of(whole, stored)
        except CkptkitError as error:
            broken[stored.codes.name] = error.message
        else:
            found[stored.name] = stored
    return found, broken


def _codes(subject: Subject, found: Mapping[str, StoredWeight], part: int) -> Checkpoint:
    """The codes (`part` 0), or the scale of each weight (1), under HF names with one tensor an expert; all floats."""
    checkpoint = subject.checkpoint
    release = Release.of(checkpoint, str(subject.path))
    made = tuple(_part_step(step_of(release, stored), stored, part) for stored in found.values())
    taken = {name for stored in found.values() for name in stored.needed}
    rest = tuple(identity(spec) for name, spec in checkpoint.specs.items() if name not in taken)
    plan = Plan((*made, *rest), checkpoint.specs, where=str(subject.path), config=checkpoint.config)
    return as_hf_view(View(checkpoint, plan), subject.path)


def _part_step(step: Step, stored: StoredWeight, part: int) -> Step:
    (output,) = step.outputs
    layout, shape = stored.layout, stored.shape
    assert shape is not None  # `step_of` has refused it

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        from ckptkit.quant.formats.floats.decode import factors, spread, values

        if part == 0:
            found = values(layout, tensors[0])
        else:
            second = tensors[2] if tensors[2:] else None
            found = spread(factors(layout, tensors[1], second, shape), layout.block, shape)
        return [found.transpose(-1, -2).contiguous() if layout.axes == "groups" else found]

    return Step(step.inputs, (TensorSpec(output.name, output.shape, "float32"),), run, step.label)


def _stored(here: Checkpoint, name: str) -> str:
    """The name of the matrix that holds this one: itself, or that of a layer's fused experts."""
    if not isinstance(here, View):
        return name
    step = here.step(name)
    return step.inputs[0] if step.label == "unfuse" else name


def _grid(layout: Layout, searched: bool) -> FloatGrid:
    if layout.is_mxfp8:
        return FloatGrid(3, 2.0**-6, 448.0, 512.0)
    if layout.number == E4M3:
        return FloatGrid(3, 2.0**-6, 448.0, 448.0 / _SEARCHED if searched else 448.0)
    return FloatGrid(1, 1.0, 6.0, 8.0, _LOST if layout.second else 0.0)


def _rounding(
    codes: Checkpoint,
    scales: Checkpoint,
    source: Checkpoint,
    grids: Mapping[str, FloatGrid],
    narrow: frozenset[str],
    names: Sequence[str],
) -> dict[str, FloatRounding]:
    code, scale, original = codes.read(names), scales.read(names), source.read(names)
    found = {name: float_rounding(code[name], scale[name], original[name], grids[name]) for name in names}
    for name in narrow.intersection(names):
        changed, zeroed, first = _changed(code[name].float(), scale[name].float(), original[name])
        found[name] = replace(found[name], changed=changed, zeroed=zeroed, first=first)
    return found


def float_rounding(codes: Tensor, scales: Tensor, original: Tensor, grid: FloatGrid) -> FloatRounding:
    """How far `codes` times `scales` are off `original`, all [rows, columns] and floats."""
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
            worst = (error[bad] / allowed[bad]).nan_to_num(math.inf).max()
            times = max(times, float(worst))
    named = rows_named(rows) if 0 < len(rows) < len(codes) else ""
    return FloatRounding(wrong, codes.numel(), times, named)


def _changed(codes: Tensor, scales: Tensor, original: Tensor) -> tuple[int, int, str]:
    """Elements that are not exactly the source's, of these the zeros, and the first; none without powers of two."""
    import torch

    mantissa, _ = torch.frexp(scales)
    if not bool((mantissa == 0.5).all()):
        return 0, 0, ""
    stored, wanted = codes * scales, original.float()
    unequal = stored != wanted
    count = int(unequal.sum())
    if not count:
        return 0, 0, ""
    row, column = unequal.nonzero()[0].tolist()
    first = f"[{row}, {column}] was {wanted[row, column]:g} and is {stored[row, column]:g}"
    return count, int((unequal & (codes == 0)).sum()), first


def _errors(codes: Tensor, scales: Tensor, original: Tensor, grid: FloatGrid, lost: float) -> tuple[Tensor, Tensor]:
    """How far each weight is off, and how far it may be; float32 [rows, columns]."""
    import torch

    weight = original.float()
    end, reach = grid.largest * scales, grid.reach * scales
    clipped = torch.where(weight.abs() <= reach, weight.clamp(-end, end), weight)
    # The power of two below a number is the number without the bits of its mantissa.
    power = (codes.abs().clamp(min=grid.normal).view(torch.int32) & _EXPONENT).view(torch.float32)
    half = power * 2.0 ** -(grid.mantissa + 1)
    return (codes * scales - clipped).abs(), half * scales.abs() + _ROUNDED * weight.abs() + lost
