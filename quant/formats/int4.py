"""Dequantizes INT4 weights packed eight to an int32 word: compressed-tensors' format, and that of Kimi K2 Thinking.

`N.weight` is stored as `N.weight_packed` int32 [rows, columns / 8], `N.weight_scale` [rows, groups], `N.weight_shape`
[2] and, if the grid is asymmetric, `N.weight_zero_point` int32 [rows / 8, groups]. It gets the scale's dtype, which is
the dtype that it had before.
Source: compressed-tensors `compressors/pack_quantized/base.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ckptkit.core.plan import Step
from ckptkit.core.specs import TensorSpec
from ckptkit.storage.buffers import ON_THE_WAY, row_cuts
from quant.formats.packing import CODES_PER_WORD, unpack, unpack_zero_point
from quant.formats.part_names import INT4_ENDINGS, PACKED, SCALE, SHAPE, ZERO_POINT
from quant.formats.release import Release
from quant.formats.scheme import SCALE_DTYPES
from quant.formats.zero_points import is_expert, of_sglang_experts

if TYPE_CHECKING:
    from torch import Tensor

_MAX_DISTANCE = 15  # steps between a code and a zero point
_INTEGERS = ("int64", "int32")


@dataclass(frozen=True)
class PackedInt4:
    """One variant of packed INT4."""

    group: int | None  # neighbours in a row that share a scale; None: one scale a row
    symmetric: bool
    unused: tuple[str, ...] = ()  # see `Format`
    sglang_experts: bool = False  # zero points of routed experts are in SGLang's layout (`quant.formats.zero_points`)

    @cached_property
    def words(self) -> str:
        """The format in a few words."""
        each = "row" if self.group is None else f"{self.group} weights"
        return (
            f"INT4 (compressed-tensors pack-quantized, {'' if self.symmetric else 'a'}symmetric, "
            f"one scale for each {each})"
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """Endings of a packed weight's parts."""
        return INT4_ENDINGS

    def steps(self, release: Release) -> Iterator[Step]:
        """Yields a step for every packed weight, which turns its parts into the weight."""
        for spec in release.specs.values():
            if spec.name.endswith(PACKED):
                yield self._step(release, spec)

    def _step(self, release: Release, packed: TensorSpec) -> Step:
        module = packed.name.removesuffix(PACKED)
        parts = [
            release.require(module + ending, packed.name)
            for ending in (SCALE, SHAPE, *([] if self.symmetric else [ZERO_POINT]))
        ]
        scale, stored_shape = parts[:2]
        if len(packed.shape) != 2 or len(scale.shape) != 2:
            raise release.refused(
                packed.name,
                f"with {scale} is not a packed matrix",
                "only one matrix a module is supported, not fused experts",
            )
        rows, groups = packed.shape[0], scale.shape[1] if self.group else 1
        shape = rows, groups * self.group if self.group else packed.shape[1] * CODES_PER_WORD
        release.check(scale.name, (rows, groups), SCALE_DTYPES, self.words, packed)
        release.check(packed.name, (rows, -(-shape[1] // CODES_PER_WORD)), ("int32",), self.words, scale)
        release.check(stored_shape.name, (2,), _INTEGERS, self.words, packed)
        if not self.symmetric:
            words = -(-rows // CODES_PER_WORD)
            zeros = (groups, words) if self._of_sglang(packed.name) else (words, groups)
            release.check(module + ZERO_POINT, zeros, ("int32",), self.words, packed)

        # A large model has 70,000 of these steps, so each is kept small.
        of_sglang = self._of_sglang(packed.name)
        run = partial(_dequantized, release, packed, scale, stored_shape.name, shape, of_sglang)
        names = (packed.name, *[part.name for part in parts])
        return Step(names, (TensorSpec(f"{module}.weight", shape, scale.dtype),), run, "dequantize INT4")

    def _of_sglang(self, name: str) -> bool:
        return self.sglang_experts and is_expert(name)


def _dequantized(
    release: Release,
    packed: TensorSpec,
    scale: TensorSpec,
    stored_shape: str,
    shape: tuple[int, int],
    of_sglang: bool,
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    words, scales, stored, *zero = tensors
    if tuple(stored.tolist()) != shape:
        hint = "config.json states another group size, or one part belongs to another weight: restore both"
        raise release.refused(
            stored_shape, f"says {stored.tolist()}, but {packed.name} and {scale.name} make {list(shape)}", hint
        )
    release.check_finite(scale.name, scales * _MAX_DISTANCE)
    if not zero:
        return [unpacked(words, scales, shape)]
    zero_point = of_sglang_experts(zero[0]) if of_sglang else unpack_zero_point(zero[0], scale.shape)
    return [unpacked(words, scales, shape, zero_point)]


def unpacked(words: Tensor, scales: Tensor, shape: tuple[int, int], zero_point: Tensor | None = None) -> Tensor:
    """Unpacks and dequantizes a weight of `shape` [rows, columns]; the result has the dtype of `scales`.

    `words`: int32 [rows, ceil(columns / 8)]. `scales`, `zero_point` (int8): [rows, groups].
    """
    import torch

    from quant.formats.grids import dequantize

    rows, columns = shape
    weight = torch.empty(shape, dtype=scales.dtype)
    for begin, end in row_cuts(rows, columns * weight.itemsize, ON_THE_WAY):
        at = slice(begin, end)
        weight[at] = dequantize(
            unpack(words[at], (end - begin, columns)), scales[at], None if zero_point is None else zero_point[at]
        )
    return weight
