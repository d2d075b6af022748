"""Measures the error of packed INT4 weights against their source, without the code that packs them.

The bound on the error of a rounded weight, in steps (one step is the scale of its group):
- Inside the grid rounding is to the nearest code: at most 1/2.
- At the end of the grid: qmax7 has scale absmax/7 and clamps nothing. minmax has scale absmax/7.5 and codes -8..7: the
  largest positive weight, at 7.5, becomes 7, again 1/2; the largest negative one, at -7.5, becomes -8 or -7.
- Rounding before that, with u the unit roundoff of the quantizer's dtype (2^-8 for bfloat16): up to 7.5 u by the scale
  at the end of the grid, and 4 u, half the spacing, by a quotient weight/scale below 8. Together below 12 u.
- Clipping: a search (`observer_kwargs.search`) shrinks a range to no less than 0.81 of itself, so a weight may be
  7.5 / 0.81 - 7.5 steps beyond the symmetric grid, or 15 / 0.81 - 15 beyond the asymmetric one.
- Asymmetric grids: range and scale are each rounded, 30 u at the end of 15 steps. The quotient, below 16, adds 8 u,
  its sum with the zero point 4 u, the quotient that the zero point is rounded from at most 6 u. Together 48 u.

AutoRound's symmetric grid has negative scales: scale = -(the weight of largest size) / 8, so that this weight is -8,
and one of the other sign, at up to 8, becomes 7. AutoRound also learns the rounding (it adds up to 1/2 to the quotient:
up to 1 step inside the grid) and the ends of each range, which in its 200 steps of at most 1/200 shrink to no less than
about half: a weight beyond the codes may be at 16, 9 steps from the last code. Roundings of a quotient below 16 are
twice those above. Source: AutoRound `quant_tensor_sym`, `wrapper`.

This bound permits steps that are too large. So if config.json names the grid, the scale is compared too: absmax/7
(qmax7, at least 1e-5) or absmax/7.5 (minmax), each rounded a few times.

GPTQ, known by `actorder`, moves a weight by several steps to compensate errors of other columns. A row stays near its
source: rounding to 4 bits moves it by about a tenth of its norm, GPTQ by up to a fifth
(`tests/interop/test_llm_compressor.py`). A row of another weight or a wrong order moves it by more than its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptkit.converters.planner import expected_hf
from ckptkit.core.progress import progress
from ckptkit.quant.formats.groups import groups_of
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

_END_CODE = {"qmax7": 7.0, "minmax": 7.5}  # the largest weight of a group, in steps
_MIN_SCALE = 1e-4
_MIN_RANGE = 0.81  # the smallest part of a group's range that a search keeps (`ckptkit.quant.formats.grids`)
_CLIPPED_STEPS = 8.0  # additional error of weights beyond the codes of AutoRound's grid
_GPTQ_LIMIT = 0.5  # distance of a GPTQ row from its source, as a part of its norm


@dataclass(frozen=True)
class Rounding:
    """The error of one packed weight, and the permitted one."""

    steps: float  # the largest error, in quantization steps
    limit: float  # the largest error of correct rounding, in steps
    scale_off: float  # relative difference of the worst scale from the grid that config.json names
    nbytes: int  # of its parts
    distance: float | None = None  # of the worst row, as a part of its norm; only for GPTQ

    @property
    def failed(self) -> bool:
        """Whether the error is too large or NaN."""
        return not (self.steps <= self.limit if self.distance is None else self.distance <= _GPTQ_LIMIT)

    @property
    def words(self) -> tuple[str, str]:
        """The permitted and the actual error, for people."""
        if self.distance is None:
            return f"values within {self.limit:.3f} quantization steps", f"values are up to {self.steps:.3g} steps away"
        return f"rows within {_GPTQ_LIMIT:.0%} of the source's norm", f"a row is {self.distance:.0%} away"


@once
def rounding_of(subject: Subject) -> dict[str, Rounding]:
    """The error of every packed weight with valid parts and a plain source, by HF name. Raises CkptkitError."""
    config, checkpoint = config_of(subject), subject.checkpoint
    if int4_format_of(config) is None or subject.source is None:
        return {}
    source, groups, shapes = source_as_hf(subject), groups_of(config), expected_hf(config)

    def parts_of(module: str) -> list[str]:
        return [f"{module}.{part}" for part in packed_parts(weights_in(config, groups, module))]

    def is_valid(module: str) -> bool:  # otherwise CK104 or CK303 reports the parts
        shape = shapes.get(f"{module}.weight")
        if shape is None or len(shape) != 2:
            return False
        expected = part_shapes(int4_format_in(config, groups, module), shape, module)
        parts = [(checkpoint.specs.get(name), *expected[name.rpartition(".")[2]]) for name in parts_of(module)]
        return all(spec is not None and spec.shape == size and spec.dtype in dtypes for spec, size, dtypes in parts)

    def measure(names: Sequence[str]) -> dict[str, Rounding]:
        rounding = {}
        for name, original in source.read(names).items():
            module = name.removesuffix(".weight")
            parts, form = checkpoint.read(parts_of(module)), int4_format_in(config, groups, module)
            rounding[name] = _rounding(parts, module, form, original, config)
        return rounding

    modules = set(filter(is_valid, packed_in(checkpoint.specs)))
    # CK702 reports a source of another size.
    named = ((name, spec) for name, spec in source.specs.items() if name.removesuffix(".weight") in modules)
    packed = {name for name, spec in named if spec.shape == shapes[name]}
    read_together = [names for group in source.groups if (names := [name for name in group if name in packed])]
    sizes = [sum(source.specs[name].nbytes for name in names) for names in read_together]
    rounding: dict[str, Rounding] = {}
    with progress("comparing INT4", sum(sizes)) as advance, threads(max(sizes, default=0)) as pool:
        for nbytes, part in zip(sizes, pool.map(measure, read_together), strict=True):
            advance(nbytes)
            rounding |= part
    return rounding


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


@dataclass(frozen=True)
class GroupDistances:
    """The errors of the groups of a weight: float32 [rows, groups] each."""

    scale: Tensor
    steps: Tensor  # the largest distance of a weight, in steps of its group
    largest: Tensor  # the largest weight of the source
    errors: Tensor  # the sum of squared distances, if requested
    squares: Tensor  # the sum of squared weights of the source, if requested

    @property
    def worst_steps(self) -> float:
        """The maximum over groups with a finite nonzero scale; CK304 reports other scales."""
        return _largest(self.steps[self.scale.isfinite() & (self.scale != 0)])

    @property
    def worst_row(self) -> float:
        """The largest distance of a row, as a part of its norm, without rows of zeros."""
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
    """Compares the parts of a module with `original` [rows, columns]; `signed` as in AutoRound, with _CLIPPED_STEPS."""
    import torch

    from ckptkit.quant.kernels.cpu import KINDS
    from ckptkit.quant.kernels.threads import bits_of

    rows, columns = original.shape
    scale, width = parts[module + SCALE].float().contiguous(), form.group or max(columns, 1)
    original = (original if original.dtype in KINDS else original.float()).contiguous()
    words, in_pairs = parts[module + PACKED].contiguous(), form.bits == 4 and width % 2 == columns % 2 == 0
    codes = words.view(torch.uint8) if in_pairs else _codes(words, form.bits, original.shape).contiguous()
    zeros = _zero_points(parts, module, form, rows).float().contiguous()
    results = torch.zeros(4, rows, scale.shape[1])
    measure = _kernel(original.dtype, in_pairs, signed, squared)
    measure(*(tensor.numpy() for tensor in (bits_of(original), codes, scale, zeros, results)), width)
    return GroupDistances(scale, *results)


@cache
def _kernel(weight: torch.dtype, in_pairs: bool, signed: bool, squared: bool) -> Callable[..., None]:
    """The function `measure(weights, codes, scales, zeros, results, width)`, which fills `results` as `GroupDistances`.

    Weights are bits of floats [rows, columns], codes int8 or uint8 `in_pairs`; a group is `width` columns. The bits of
    float32 have the order of the numbers, with NaN above infinity.
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

    def measure(weights: Any, codes: Any, scales: Any, zeros: Any, results: Any, width: int) -> None:
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
                results[0, row, group], results[1, row, group] = i32(sums[0]).view(f32), i32(sums[1]).view(f32)
                results[2, row, group], results[3, row, group] = sums[2], sums[3]

    return compiled(measure)


def _zero_points(parts: Mapping[str, Tensor], module: str, form: Int4Format, rows: int) -> Tensor:
    import torch

    groups = parts[module + SCALE].shape[1]
    if form.symmetric:
        return torch.zeros(rows, groups)
    stored = parts[module + ZERO_POINT]
    if not (form.sglang_experts and ".experts." in module):
        return _codes(stored.T, form.bits, (groups, rows)).T
    # The rows of each word are in AWQ's order. Source: SGLang `moe_awq_to_marlin_zero_points`.
    words = _codes(stored, form.bits, (groups, rows)).reshape(groups, -1, 8)
    return words[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(groups, rows).T


def _codes(words: Tensor, bits: int, shape: Sequence[int]) -> Tensor:
    """Unpacks int32 words along the rows to int8 [rows, columns] of `shape`."""
    import torch

    if bits != 4:
        # Imports transformers, which takes longer than the comparison of a small checkpoint.
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        codes: Tensor = unpack_from_int32(words, bits, torch.Size(shape))
        return codes
    # A word has eight codes, each plus 8, the lowest first. Source: compressed-tensors `pack_to_int32`.
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, : shape[1]].view(torch.int8) - 8


def bound_in_steps(
    dtype: torch.dtype, symmetric: bool, searched: bool = False, signed: bool = False, bits: int = BITS
) -> float:
    """The largest error of a correctly rounded weight, in steps, with scales in `dtype`; `signed` as in AutoRound."""
    import torch

    unit_roundoff, wider = torch.finfo(dtype).eps / 2, 2.0 ** (bits - BITS)
    if signed:
        return 1.0 + 24 * wider * unit_roundoff
    clipped = (7.5 if symmetric else 15) * (1 / _MIN_RANGE - 1) if searched else 0.0
    return 0.5 + wider * (clipped + (12 if symmetric else 48) * unit_roundoff)


def is_searched(config: Mapping[str, Any]) -> bool:
    """Whether scales were searched for, by config.json, and so clip the largest weights."""
    return bool(observer_kwargs(weights_of(config)).get("search", "none") != "none")


def is_gptq(config: Mapping[str, Any]) -> bool:
    """Whether config.json names an order of columns, which only GPTQ has."""
    return weights_of(config).get("actorder") not in (None, False)


def keeps_scales(config: Mapping[str, Any]) -> bool:
    """Whether some scales were kept from a checkpoint on another grid, by config.json."""
    return observer_kwargs(weights_of(config)).get(KEPT_SCALES) is True


def names_grid(config: Mapping[str, Any]) -> bool:
    """Whether ckptkit made all scales, by config.json, and so none is negative."""
    return observer_kwargs(weights_of(config)).get("grid") in _END_CODE and not keeps_scales(config)


def grid_of(config: Mapping[str, Any]) -> str | None:
    """The symmetric grid of all scales by config.json, or None if it is unknown or scales were searched for or kept."""
    weights = weights_of(config)
    if not names_grid(config) or is_searched(config) or weights.get("symmetric", True) is False:
        return None
    return str(observer_kwargs(weights)["grid"])


def scale_off(scale: Tensor, largest: Tensor, dtype: torch.dtype, grid: str) -> float:
    """The relative difference of the worst scale [rows, groups] from that of `grid`, or 0 if rounding explains it."""
    import torch

    expected = largest / _END_CODE[grid]
    allowed = 4 * (torch.finfo(scale.dtype).eps + torch.finfo(dtype).eps)
    counted = (expected > _MIN_SCALE) & scale.isfinite() & (scale > 0)  # CK304 reports other scales
    worst = _largest(((scale.float() - expected).abs() / expected)[counted])
    return worst if worst > allowed else 0.0
