"""INT4 weights packed eight to an int32 word, as compressed-tensors and Kimi K2 Thinking store them; zero points too.

`N.weight` is stored as `N.weight_packed` int32 [rows, columns / 8], `N.weight_scale` [rows, groups], `N.weight_shape`
[2] and, if the grid is asymmetric, `N.weight_zero_point` int32 [rows / 8, groups]. It gets the scale's dtype, which is
the dtype that it had before. Source: compressed-tensors `compressors/pack_quantized/base.py`. Element i of a row is in
word i // 8, bits 4 * (i % 8) and up, stored as code + 8 (so 0..15). The bytes are those of `pack_to_int32` there, which
needs int32 temporaries of 8 bytes a code and takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Step
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.formats.part_names import INT4_ENDINGS, PACKED, SCALE, SHAPE, ZERO_POINT
from ckptkit.quant.formats.release import Release
from ckptkit.quant.formats.scheme import CODES_PER_WORD as CODES_PER_WORD
from ckptkit.quant.formats.scheme import SCALE_DTYPES, QuantScheme
from ckptkit.storage.buffers import ON_THE_WAY, row_cuts

if TYPE_CHECKING:
    from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """Packs int8 [rows, columns] in -8..7, with columns divisible by 8, to int32 [rows, columns / 8]."""
    import torch

    if not codes.numel():
        return codes.new_empty((codes.shape[0], codes.shape[1] // CODES_PER_WORD), dtype=torch.int32)
    # Two neighbours seen as one little-endian int16: the first is its low byte.
    pairs = (codes + 8).view(torch.int16)
    return ((pairs & 0xF) | (pairs >> 4)).to(torch.uint8).view(torch.int32)


def pack_zero_point(zero_point: Tensor) -> Tensor:
    """Packs zero points along the rows: int8 [..., rows, groups] in -8..7 to int32 [..., ceil(rows / 8), groups].

    Nibbles after the last row are 0. Source: compressed-tensors `pack_to_int32` with `packed_dim=0`.
    """
    import torch

    *batch, rows, groups = zero_point.shape
    padded = torch.nn.functional.pad(zero_point + 8, (0, 0, 0, -rows % CODES_PER_WORD))
    nibbles = padded.view(*batch, padded.shape[-2] // CODES_PER_WORD, CODES_PER_WORD, groups).int()
    places = torch.arange(0, 32, 4, dtype=torch.int32, device=zero_point.device)
    return (nibbles << places.unsqueeze(-1)).sum(-2, dtype=torch.int32)


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Unpacks int32 [rows, ceil(columns / 8)] to int8 [rows, columns] in -8..7; `shape`: [rows, columns]."""
    import torch

    rows, columns = shape
    pairs = packed.contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).view(torch.int8)
    return codes.reshape(rows, packed.shape[1] * CODES_PER_WORD)[:, :columns] - 8


def unpack_zero_point(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Unpacks zero points along the rows: int32 [ceil(rows / 8), groups] to int8 [rows, groups] in -8..7."""
    import torch

    rows, groups = shape
    # Copied: a transposed single row of words counts as contiguous, but cannot be viewed as bytes.
    return unpack(packed.T.clone(memory_format=torch.contiguous_format), (groups, rows)).T


class Packed(NamedTuple):
    """The stored parts of an INT4 matrix.

    `words`: int32 [rows, columns / 8]. `scale`: [rows, groups], in the scheme's scale dtype or the weight's.
    `zero_point`: int32 [ceil(rows / 8), groups], packed along the rows as in compressed-tensors; None if symmetric.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Packed:
        """From int8 codes [rows, columns] and int8 zero points [rows, groups], all in -8..7."""
        return cls(pack(codes), scale, None if zero_point is None else pack_zero_point(zero_point))


# Which of eight rows each nibble of a word holds, lowest nibble first: AWQ's order.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_EXPERTS = ".experts."
# Inputs of a tile of SGLang's Marlin kernel for experts, which chooses one by how many fit a GPU (on an H100 the
# smaller). It reads the zero points of one group a tile, and those of further groups from uninitialized memory. Source:
# `zp_sh_wr_pred` of `marlin_moe/marlin_template.h` in 0.5.16 and 0.5.23; the kernel of dense layers is correct.
SMALL_TILE, LARGE_TILE = 64, 128
_READ_AS_STORED = frozenset({"vllm", "transformers"})  # readers of compressed-tensors' own layout


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to a routed expert."""
    return _EXPERTS in name


def check_zero_point_layout(scheme: QuantScheme, has_experts: bool, readers: Sequence[str]) -> bool:
    """Whether to store the zero points of routed experts in SGLang's layout, which no other reader supports.

    `has_experts`: whether routed experts are quantized. Raises CkptkitError if they need zero points and `readers` has
    SGLang and another reader: no layout suits both. slime and miles send weights to SGLang.
    """
    if scheme.symmetric or not has_experts or (readers and _READ_AS_STORED.issuperset(readers)):
        return False
    if tuple(readers) == ("sglang",):
        if scheme.group_size is not None and scheme.group_size < SMALL_TILE:
            raise CkptkitError(
                f"experts have zero points in groups of {scheme.group_size}, but SGLang's kernel reads those of one "
                f"group per {SMALL_TILE} inputs, so its answers vary from request to request",
                f"pass --group-size {LARGE_TILE} or channel, or remove --asymmetric",
            )
        return True
    raise CkptkitError(
        "SGLang reads the zero points of routed experts in another layout than compressed-tensors and other readers",
        "remove --asymmetric; or, for one engine only, pass --reader sglang or --reader vllm",
    )


def to_sglang_zero_points(zero_point: Tensor, rows: int, name: str) -> Tensor:
    """Converts int32 [ceil(rows / 8), groups] (compressed-tensors) to int32 [groups, rows / 8] (SGLang).

    A word of the result holds eight rows in AWQ's order. Raises CkptkitError when the rows do not fill words.
    Source: SGLang `moe_awq_to_marlin_zero_points`, and `FusedMoE.weight_loader`, which transposes all but zero points.
    """
    if rows % CODES_PER_WORD:
        message = f"{name} has {rows} output features, but zero points are packed in words of {CODES_PER_WORD}"
        raise CkptkitError(message, "quantize symmetrically, or exclude the tensor with --ignore")
    groups = zero_point.shape[1]
    codes = unpack_zero_point(zero_point, (rows, groups)).T.reshape(groups, rows // CODES_PER_WORD, CODES_PER_WORD)
    return pack(codes[:, :, list(_ORDER)].reshape(groups, rows))


def from_sglang_zero_points(zero_point: Tensor) -> Tensor:
    """The zero points int8 [rows, groups] of int32 [groups, rows / 8] in SGLang's layout."""
    groups, words = zero_point.shape
    codes = unpack(zero_point, (groups, words * CODES_PER_WORD)).view(groups, words, CODES_PER_WORD)
    order = [_ORDER.index(row) for row in range(CODES_PER_WORD)]
    return codes[:, :, order].reshape(groups, -1).T.contiguous()


_MAX_DISTANCE = 15  # steps between a code and a zero point
_INTEGERS = ("int64", "int32")


@dataclass(frozen=True)
class PackedInt4:
    """One variant of packed INT4."""

    parts: ClassVar[tuple[str, ...]] = INT4_ENDINGS  # endings of a packed weight's parts
    group: int | None  # neighbours in a row that share a scale, or None for one scale a row
    symmetric: bool
    unused: tuple[str, ...] = ()  # endings of tensors that quantize activations
    sglang_experts: bool = False  # zero points of routed experts are in SGLang's layout

    @cached_property
    def words(self) -> str:
        """The format in a few words."""
        each = "row" if self.group is None else f"{self.group} weights"
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"INT4 (compressed-tensors pack-quantized, {kind}, one scale for each {each})"

    def steps(self, release: Release) -> Iterator[Step]:
        """Yields a step for every packed weight, which turns its parts into the weight."""
        return (self._step(release, spec) for spec in release.specs.values() if spec.name.endswith(PACKED))

    def _step(self, release: Release, packed: TensorSpec) -> Step:
        module, of_sglang = packed.name.removesuffix(PACKED), self.sglang_experts and is_expert(packed.name)
        endings = (SCALE, SHAPE) if self.symmetric else (SCALE, SHAPE, ZERO_POINT)
        parts = [release.require(module + ending, packed.name) for ending in endings]
        scale, stored_shape = parts[:2]
        if len(packed.shape) != 2 or len(scale.shape) != 2:
            hint = "start from a release with one matrix per module: fused experts are not supported"
            raise release.refused(packed.name, f"and {scale} are not parts of one packed matrix", hint)
        rows, groups = packed.shape[0], scale.shape[1] if self.group else 1
        shape = rows, groups * self.group if self.group else packed.shape[1] * CODES_PER_WORD
        release.check(scale.name, (rows, groups), SCALE_DTYPES, self.words, packed)
        release.check(packed.name, (rows, -(-shape[1] // CODES_PER_WORD)), ("int32",), self.words, scale)
        release.check(stored_shape.name, (2,), _INTEGERS, self.words, packed)
        if not self.symmetric:
            words = -(-rows // CODES_PER_WORD)
            zeros = (groups, words) if of_sglang else (words, groups)
            release.check(module + ZERO_POINT, zeros, ("int32",), self.words, packed)

        # A large model has 70,000 of these steps, so each is kept small.
        run = partial(_dequantized, release, packed, scale, stored_shape.name, shape, of_sglang)
        names = (packed.name, *[part.name for part in parts])
        return Step(names, (TensorSpec(f"{module}.weight", shape, scale.dtype),), run, "dequantize INT4")


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
        hint = "restore config.json and these tensors from the release: the group size or a part is wrong"
        reason = f"contains {stored.tolist()}, but {packed.name} and {scale.name} have shape {list(shape)}"
        raise release.refused(stored_shape, reason, hint)
    release.check_finite(scale.name, scales * _MAX_DISTANCE)
    if not zero:
        return [unpacked(words, scales, shape)]
    zero_point = from_sglang_zero_points(zero[0]) if of_sglang else unpack_zero_point(zero[0], scale.shape)
    return [unpacked(words, scales, shape, zero_point)]


def unpacked(words: Tensor, scales: Tensor, shape: tuple[int, int], zero_point: Tensor | None = None) -> Tensor:
    """Unpacks and dequantizes a weight of `shape` [rows, columns]; the result has the dtype of `scales`.

    `words`: int32 [rows, ceil(columns / 8)]. `scales`, `zero_point` (int8): [rows, groups].
    """
    import torch

    from ckptkit.quant.formats.grids import dequantize

    rows, columns = shape
    weight = torch.empty(shape, dtype=scales.dtype)
    for begin, end in row_cuts(rows, columns * weight.itemsize, ON_THE_WAY):
        at = slice(begin, end)
        zero = None if zero_point is None else zero_point[at]
        weight[at] = dequantize(unpack(words[at], (end - begin, columns)), scales[at], zero)
    return weight
