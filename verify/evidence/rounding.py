"""Measures how far packed INT4 weights are off their source, unpacked here and not by what packs them.

The bound on the error of a rounded weight, in steps (one step is the scale of its group):
- Inside the grid rounding is to the nearest code, so the error is at most 1/2.
- At the clamped end. qmax7 has scale absmax/7, so nothing is clamped. minmax has scale absmax/7.5 and codes -8..7: the
  largest positive weight stands at 7.5 and becomes 7, again 1/2; the largest negative one, at -7.5, becomes -8 or -7.
- Rounding on the way, with u the unit roundoff of the dtype that the quantizer computes and stores scales in (2^-8 for
  bfloat16). A rounded scale puts the end of the grid up to 7.5 u further out. A quotient weight/scale below 8 is
  rounded by up to half its spacing, 4 u. Together below 12 u.
- Clipping. A search (`observer_kwargs.search`) shrinks a range to no less than 0.81 of itself: a weight may stand up to
  7.5 / 0.81 - 7.5 steps beyond the symmetric grid, or 15 / 0.81 - 15 beyond the asymmetric one.
- Asymmetric grids. Range and scale are each rounded: 30 u at the end of 15 steps. The quotient, below 16, takes 8 u,
  its sum with the zero point 4 u, the quotient that the zero point is rounded from at most 6 u more. Together 48 u.

Negative scales, as AutoRound's symmetric grid has them: scale = -(the weight of largest size) / 8, so that this one is
always -8, and one of the other sign, at up to 8, becomes 7. AutoRound also learns the rounding (it adds up to 1/2 to
the quotient, so a weight inside the grid is up to 1 step off) and the ends of each range, which in its 200 steps of at
most 1/200 shrink to no less than about half: a weight beyond the end of the codes may stand at up to 16, 9 steps from
the last code. Roundings of a quotient below 16 are twice those above. Source: AutoRound `quant_tensor_sym`, `wrapper`.

A step that is too large hides behind this bound, so where config.json names the grid the scale itself is compared too:
absmax/7 (qmax7, at least 1e-5) or absmax/7.5 (minmax), each rounded a few times on the way.

GPTQ does not round to nearest: it moves a weight by several steps to make up for the errors of other columns. Its
output is known by `actorder`, the order of columns, in config.json. What holds there is that a row stays near its
source: rounding to 4 bits moves it by about a tenth of its norm, GPTQ by up to a fifth where there is little
calibration data (`tests/interop/test_llm_compressor.py`); a row of another weight, nibbles in another order or a zero
point of another group move it by more than its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ckptkit.converters.planner import expected_hf
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.progress import progress
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.formats.groups import Group, groups_of
from ckptkit.quant.formats.part_names import PACKED, SCALE, ZERO_POINT, packed_in
from ckptkit.quant.formats.scheme import BITS, KEPT_SCALES
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.both_sides import threads
from ckptkit.verify.evidence.expected import config_of, packed_parts, weights_in, weights_of
from ckptkit.verify.evidence.packed import Int4Format, int4_format_in, int4_format_of, observer_kwargs, part_shapes
from ckptkit.verify.evidence.reading import source_as_hf

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The code, as a number, that the largest weight of a group stands at before it is rounded.
_END_CODE = {"qmax7": 7.0, "minmax": 7.5}
_MIN_SCALE = 1e-4
# The smallest part of a group's range that a search keeps (`ckptkit.quant.formats.grids`).
_MIN_RANGE = 0.81
# How many steps further off than others a weight may be that stands beyond the codes of AutoRound's grid.
_CLIPPED_STEPS = 8.0
# The largest distance of a row that GPTQ rounded from its source, as a part of its norm.
_GPTQ_LIMIT = 0.5


@dataclass(frozen=True)
class Rounding:
    """How far one packed weight is off its source, and how far it may be."""

    steps: float  # the largest error, in quantization steps
    limit: float  # the largest error of correct rounding, in steps
    scale_off: float  # relative difference of the worst scale from the grid that config.json names
    nbytes: int  # of its parts
    distance: float | None = None  # of the worst row, as a part of its norm; None where GPTQ did not round

    @property
    def failed(self) -> bool:
        """Whether it is too far off, NaN included."""
        return not (self.steps <= self.limit if self.distance is None else self.distance <= _GPTQ_LIMIT)

    @property
    def words(self) -> tuple[str, str]:
        """How far off it may be, and how far it is, for people."""
        if self.distance is None:
            return f"at most {self.limit:.3f} quantization steps off", f"up to {self.steps:.3g} quantization steps off"
        return f"rows within {_GPTQ_LIMIT:.0%} of their norm", f"a row {self.distance:.0%} off"


@once
def rounding_of(subject: Subject) -> dict[str, Rounding]:
    """How far every packed weight with sound parts is off the source, by the HF name of the plain weight.

    The checkpoint must be packed, in a known format, and its source must not be. Raises CkptkitError where one of the
    two cannot be read.
    """
    config, specs = config_of(subject), subject.checkpoint.specs
    if int4_format_of(config) is None or subject.source is None:
        return {}
    source, groups = source_as_hf(subject), groups_of(config)
    shapes = expected_hf(config)
    modules = {module for module in packed_in(specs) if _fits(module, specs, config, groups, shapes)}
    # A source of another size is another model, which CK702 says.
    packed = {
        name
        for name, spec in source.specs.items()
        if name.removesuffix(".weight") in modules and spec.shape == shapes[name]
    }
    together = [names for group in source.groups if (names := [name for name in group if name in packed])]
    sizes = [sum(source.specs[name].nbytes for name in names) for names in together]
    look = partial(_look, subject.checkpoint, source, groups, config)
    found: dict[str, Rounding] = {}
    with progress("comparing INT4", sum(sizes)) as advance, threads(max(sizes, default=0)) as pool:
        for nbytes, part in zip(sizes, pool.map(look, together), strict=True):
            advance(nbytes)
            found |= part
    return found


def _look(
    checkpoint: Checkpoint,
    source: Checkpoint,
    groups: Sequence[Group],
    config: Mapping[str, Any],
    names: Sequence[str],
) -> dict[str, Rounding]:
    found = {}
    for name, original in source.read(names).items():
        module = name.removesuffix(".weight")
        form = int4_format_in(config, groups, module)
        parts = checkpoint.read([f"{module}.{part}" for part in packed_parts(weights_in(config, groups, module))])
        found[name] = _rounding(parts, module, form, original, config)
    return found


def _rounding(
    parts: Mapping[str, Tensor], module: str, form: Int4Format, original: Tensor, config: Mapping[str, Any]
) -> Rounding:
    scale, gptq = parts[module + SCALE], is_gptq(config)
    grid = grid_of(config) if form.bits == BITS else None
    signed = form.symmetric and bool((scale < 0).any())
    groups = group_distances(parts, module, form, original, signed, gptq)
    worst = groups.worst_steps
    limit = bound_in_steps(scale.dtype, form.symmetric, is_searched(config), signed, form.bits)
    return Rounding(
        steps=worst,
        limit=limit,
        scale_off=scale_off(scale, groups.largest, original.dtype, grid) if grid and worst <= limit else 0.0,
        nbytes=sum(tensor.nbytes for tensor in parts.values()),
        distance=groups.worst_row if gptq else None,
    )


def _fits(
    module: str,
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    groups: Sequence[Group],
    shapes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether all parts are there with the right shapes; where not, CK104 or CK303 has said so."""
    shape = shapes.get(f"{module}.weight")
    if shape is None or len(shape) != 2:
        return False
    wanted = part_shapes(int4_format_in(config, groups, module), shape, module)
    parts = packed_parts(weights_in(config, groups, module))
    found = [(specs.get(f"{module}.{part}"), wanted[part]) for part in parts]
    return all(spec is not None and spec.shape == want and spec.dtype in dtypes for spec, (want, dtypes) in found)


@dataclass(frozen=True)
class GroupDistances:
    """How far the groups of a weight are off their source: float32 [rows, groups] each."""

    scale: Tensor
    steps: Tensor  # the largest distance of a weight, in steps of its group
    largest: Tensor  # the largest weight of the source
    errors: Tensor  # the sum of squared distances; 0 unless they were asked for
    squares: Tensor  # the sum of squared weights of the source; as `errors`

    @property
    def worst_steps(self) -> float:
        """Of all groups, but for those whose scale is zero or not finite, which CK304 names."""
        return _largest(self.steps[self.scale.isfinite() & (self.scale != 0)])

    @property
    def worst_row(self) -> float:
        """The largest distance of a row, as a part of its norm; rows of zeros are left out."""
        norms = self.squares.sum(dim=1).sqrt()
        return _largest((self.errors.sum(dim=1).sqrt() / norms)[norms > 0])


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def group_distances(
    parts: Mapping[str, Tensor],
    module: str,
    form: Int4Format,
    original: Tensor,
    signed: bool = False,
    squared: bool = False,
) -> GroupDistances:
    """Compares the parts of a module with `original` [rows, columns], in one loop without temporary arrays.

    `signed`: as AutoRound rounds; `_CLIPPED_STEPS` is then taken off the distance of weights beyond the last code.
    """
    import torch

    from ckptkit.quant.kernels.cpu import KINDS
    from ckptkit.quant.kernels.threads import bits_of

    rows, columns = original.shape
    scale, width = parts[module + SCALE].float().contiguous(), form.group or max(columns, 1)
    original = (original if original.dtype in KINDS else original.float()).contiguous()
    words, in_pairs = parts[module + PACKED].contiguous(), form.bits == 4 and width % 2 == columns % 2 == 0
    codes = words.view(torch.uint8) if in_pairs else _codes(words, form.bits, original.shape).contiguous()
    zeros = _zero_points(parts, module, form, rows).float().contiguous()
    found = torch.zeros(4, rows, scale.shape[1])
    measure = _kernel(original.dtype, in_pairs, signed, squared)
    measure(*(one.numpy() for one in (bits_of(original), codes, scale, zeros, found)), width)
    return GroupDistances(scale, *found)


@cache
def _kernel(weight: torch.dtype, in_pairs: bool, signed: bool, squared: bool) -> Callable[..., None]:
    """The function `measure(weights, codes, scales, zeros, found, width)`, which fills `found` as `GroupDistances`.

    Weights are the bits of their floats [rows, columns], codes int8 [rows, columns], or uint8 with two each `in_pairs`;
    a group is `width` columns. Numbers are float32 and rounded at each step. The largest is found among their bits,
    which order as the numbers do, with NaN above infinity.
    """
    import numpy as np

    from ckptkit.quant.kernels.cpu import KINDS, compiled, from_bits, inlined

    kind, f32, i32 = KINDS[weight], np.float32, np.int32
    clipped = f32(_CLIPPED_STEPS)

    def add(sums: Any, code: Any, number: Any, scale: Any, zero: Any) -> Any:
        worst, high, error, square = sums
        far = number - (code - zero) * scale
        steps = f32(abs(far) / abs(scale))
        if signed:
            ideal = number / scale
            is_clipped = (ideal < f32(-8)) & (code == f32(-8)) | (ideal > f32(7)) & (code == f32(7))
            steps -= clipped * f32(is_clipped)
        if squared:
            error, square = error + far * far, square + number * number
        return i32(max(worst, f32(steps).view(i32))), i32(max(high, f32(abs(number)).view(i32))), error, square

    added = inlined(add)

    def measure(weights: Any, codes: Any, scales: Any, zeros: Any, found: Any, width: int) -> None:
        for row in range(scales.shape[0]):
            for group in range(scales.shape[1]):
                begin, end = group * width, min(group * width + width, weights.shape[1])
                some, scale, zero = weights[row, begin:end], scales[row, group], zeros[row, group]
                sums = i32(0), i32(0), f32(0), f32(0)
                pairs = codes[row, begin // 2 : end // 2] if in_pairs else codes[row, begin:end]
                for at in range(np.uint64(0), np.uint64(pairs.size)):
                    if in_pairs:
                        second = from_bits(some[2 * at + np.uint64(1)], kind)
                        sums = added(sums, f32(pairs[at] >> 4) - f32(8), second, scale, zero)
                        sums = added(sums, f32(pairs[at] & 15) - f32(8), from_bits(some[2 * at], kind), scale, zero)
                    else:
                        sums = added(sums, f32(pairs[at]), from_bits(some[at], kind), scale, zero)
                found[0, row, group], found[1, row, group] = i32(sums[0]).view(f32), i32(sums[1]).view(f32)
                found[2, row, group], found[3, row, group] = sums[2], sums[3]

    return compiled(measure)


def _zero_points(parts: Mapping[str, Tensor], module: str, form: Int4Format, rows: int) -> Tensor:
    """What is taken off the codes of each group, [rows, groups]."""
    import torch

    groups = parts[module + SCALE].shape[1]
    if form.symmetric:
        return torch.zeros(rows, groups)
    stored = parts[module + ZERO_POINT]
    if not _is_turned(form, module):
        return _codes(stored.T, form.bits, (groups, rows)).T
    # The rows of each word are in AWQ's order. Source: SGLang `moe_awq_to_marlin_zero_points`.
    words = _codes(stored, form.bits, (groups, rows)).reshape(groups, -1, 8)
    return words[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(groups, rows).T


def _codes(words: Tensor, bits: int, shape: Sequence[int]) -> Tensor:
    """int8 [rows, columns] of `shape`, from int32 words along the rows; of 4 bits eight a word, the lowest first, each
    plus 8. Source: compressed-tensors `pack_to_int32`. Other widths are unpacked by compressed-tensors.
    """
    import torch

    if bits != 4:
        # Brings transformers with it, which takes longer to import than a small checkpoint to compare.
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        found: Tensor = unpack_from_int32(words, bits, torch.Size(shape))
        return found
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, : shape[1]].view(torch.int8) - 8


def _is_turned(form: Int4Format, module: str) -> bool:
    """Whether zero points are [groups, words of rows], as SGLang reads those of experts."""
    return form.sglang_experts and ".experts." in module


def bound_in_steps(
    dtype: torch.dtype, symmetric: bool, searched: bool = False, signed: bool = False, bits: int = BITS
) -> float:
    """The largest error of a correctly rounded weight, in steps, where scales are stored in `dtype`.

    `signed`: some scales are negative, and what `_CLIPPED_STEPS` allows is already taken off. Of more `bits` the codes
    are larger, and so is all that is a part of them.
    """
    import torch

    unit_roundoff, wider = torch.finfo(dtype).eps / 2, 2.0 ** (bits - BITS)
    if signed:
        return 1.0 + 24 * wider * unit_roundoff
    clipped = (7.5 if symmetric else 15) * (1 / _MIN_RANGE - 1) if searched else 0.0
    return 0.5 + wider * (clipped + (12 if symmetric else 48) * unit_roundoff)


def is_searched(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that scales were searched for, and so clip the largest weights."""
    return bool(observer_kwargs(weights_of(config)).get("search", "none") != "none")


def is_gptq(config: Mapping[str, Any]) -> bool:
    """Whether config.json names an order of columns, which GPTQ alone has."""
    return weights_of(config).get("actorder") not in (None, False)


def keeps_scales(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that some scales were kept from a checkpoint on another grid."""
    return observer_kwargs(weights_of(config)).get(KEPT_SCALES) is True


def names_grid(config: Mapping[str, Any]) -> bool:
    """Whether ckptkit made all scales, by config.json, and so none is negative."""
    return observer_kwargs(weights_of(config)).get("grid") in _END_CODE and not keeps_scales(config)


def grid_of(config: Mapping[str, Any]) -> str | None:
    """The symmetric grid of all scales; None where config.json names none, or scales were searched for or kept."""
    weights = weights_of(config)
    if not names_grid(config) or is_searched(config) or weights.get("symmetric", True) is False:
        return None
    return str(observer_kwargs(weights)["grid"])


def scale_off(scale: Tensor, largest: Tensor, dtype: torch.dtype, grid: str) -> float:
    """By how much, as a part of itself, the worst scale [rows, groups] differs from that of `grid`; 0 where none does.

    `largest`: the largest weight of each group, of a source in `dtype`. A few roundings to the dtypes of weights and
    scales are allowed for. Left out are groups so small that the grid's floor decides, and those whose scale is not a
    positive number, of which CK304 speaks.
    """
    import torch

    wanted = largest / _END_CODE[grid]
    allowed = 4 * (torch.finfo(scale.dtype).eps + torch.finfo(dtype).eps)
    counted = (wanted > _MIN_SCALE) & scale.isfinite() & (scale > 0)
    worst = _largest(((scale.float() - wanted).abs() / wanted)[counted])
    return worst if worst > allowed else 0.0
