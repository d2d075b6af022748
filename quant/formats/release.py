"""Describes a quantized release by its headers, and finds and dequantizes its weights in low-precision floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Step
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.floats.layout import E4M3, PACKED_GROUP, Layout

if TYPE_CHECKING:
    from torch import Tensor

DAMAGED = "download or copy this file again; if it equals the release's file, the release is broken"


@dataclass(frozen=True)
class Release:
    """The tensors of a quantized checkpoint at `where`, and the file of each, if known."""

    where: str
    specs: Mapping[str, TensorSpec]
    files: Mapping[str, Path]

    @classmethod
    def of(cls, source: Checkpoint, where: str) -> Release:
        """Describes `source` by its headers."""
        shards = source.shards.values() if isinstance(source, HfCheckpoint) else []
        return cls(where, source.specs, {name: shard.path for shard in shards for name in shard.specs})

    def location(self, name: str) -> str:
        """Returns the file that holds a tensor, or `where` if it is not known."""
        return str(self.files.get(name, self.where))

    def refused(self, name: str, why: str, hint: str) -> CkptkitError:
        """Returns an error that names a tensor, its shape and dtype, and its file."""
        return CkptkitError(f"{self.location(name)}: {self.specs.get(name, name)} {why}", hint)

    def require(self, name: str, needed_by: str) -> TensorSpec:
        """Returns the tensor `name`. Raises CkptkitError if it is missing."""
        if name not in self.specs:
            hint = "compare the names with the release's index: a shard is missing or stale"
            raise self.refused(needed_by, f"has no {name} stored with it", hint)
        return self.specs[name]

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], *why: object) -> None:
        """Raises CkptkitError unless a tensor has this shape and one of these dtypes; `why`: their causes."""
        spec = self.specs[name]
        if spec.shape != shape or spec.dtype not in dtypes:
            reason = f"must be {list(shape)} {' or '.join(dtypes)}, according to {' and '.join(map(str, why))}"
            hint = "restore config.json and this shard from the release: one belongs to other weights"
            raise self.refused(name, reason, hint)

    def check_finite(self, name: str, values: Tensor) -> None:
        """Raises CkptkitError for NaN or infinity in `values`, the largest that this tensor can produce."""
        if not bool(values.isfinite().all()):
            raise self.refused(name, "dequantizes to NaN or infinity", DAMAGED)


CACHE_SCALES = tuple(f".{letter}_{part}" for letter in "kvq" for part in ("scale", "zero_point"))


@dataclass(frozen=True)
class StoredWeight:
    """One weight in low-precision floats, by headers. Parts may be missing or not fit."""

    name: str  # of the plain weight
    layout: Layout
    codes: TensorSpec
    shape: tuple[int, ...] | None  # of the weight, [..., rows, columns], or None if the codes are not those of a matrix
    scale: str  # the stored name, or the usual one if no scale is stored
    second: str | None
    inputs: tuple[str, ...]

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the parts that the weight is computed from, the codes first."""
        return (self.codes.name, self.scale, *([self.second] if self.second else []))


@dataclass(frozen=True)
class Floats:
    """The formats of a release."""

    layouts: tuple[Layout, ...]
    of_module: Callable[[str], Layout | None] | None = None  # the layout that config.json declares for a module
    cache: bool = False  # whether scales of a key-value cache may be stored

    @cached_property
    def words(self) -> str:
        """The formats in a few words."""
        return " and ".join(dict.fromkeys(layout.words for layout in self.layouts))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Endings of tensor names that only parts of a quantized weight have."""
        return tuple(dict.fromkeys(part for layout in self.layouts for part in layout.parts))

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """Endings of tensors that quantize activations or a cache, which plain weights do not need."""
        endings = [ending for layout in self.layouts for ending in layout.inputs]
        return tuple(dict.fromkeys((*endings, *(CACHE_SCALES if self.cache else ()))))

    @cached_property
    def _scale_endings(self) -> tuple[str, ...]:
        return tuple({ending for layout in self.layouts for ending in (*layout.scales, layout.second) if ending})

    def weights(self, specs: Mapping[str, TensorSpec]) -> Iterator[StoredWeight]:
        """Yields every weight that is stored in codes."""
        return filter(None, (self.weight(spec, specs) for spec in specs.values()))

    def weight(self, codes: TensorSpec, specs: Mapping[str, TensorSpec]) -> StoredWeight | None:
        """Returns the weight that this tensor has the codes of, or None if it has no codes."""
        fitting = [layout for layout in self.layouts if layout.is_codes(codes)]
        if not fitting or codes.name.endswith(self._scale_endings):
            return None
        if len(fitting) > 1 and self.of_module is not None:
            declared = self.of_module(fitting[0].weight(codes.name).removesuffix(".weight"))
            fitting = [declared] if declared in fitting else fitting
        candidates = [_stored_weight(layout, codes, specs) for layout in fitting]
        return next((one for one in candidates if wrong_scale(one, specs) is None), candidates[0])

    def steps(self, release: Release) -> Iterator[Step]:
        """Yields a step for every weight, which turns its parts into bfloat16."""
        return (step_of(release, stored) for stored in self.weights(release.specs))


def _stored_weight(layout: Layout, codes: TensorSpec, specs: Mapping[str, TensorSpec]) -> StoredWeight:
    name = layout.weight(codes.name)
    names = [layout.part_name(name, ending) for ending in layout.scales]
    scale = next((one for one in names if one in specs), names[0])
    second = layout.part_name(name, layout.second) if layout.second else None
    inputs = tuple(layout.part_name(name, ending) for ending in layout.inputs)
    return StoredWeight(name, layout, codes, layout.shape(codes), scale, second, inputs)


def wrong_scale(stored: StoredWeight, specs: Mapping[str, TensorSpec]) -> str | None:
    """Returns the shape and dtypes that the stored scale should have, in words, or None if it is right."""
    spec = specs.get(stored.scale)
    if stored.shape is None or spec is None:
        return "a matrix and its scale"
    shapes, dtypes = stored.layout.scale_shapes(stored.shape), stored.layout.scale_dtypes
    fits = spec.shape in shapes and spec.dtype in dtypes
    return None if fits else f"{list(shapes[0])} {' or '.join(dtypes)}"


def step_of(release: Release, stored: StoredWeight) -> Step:
    """Returns the step that dequantizes a weight. Raises CkptkitError, naming tensor and file, for unfitting parts."""
    layout, codes, shape = stored.layout, stored.codes, stored.shape
    if layout.axes == "groups" and (shape is None or codes.dtype != "uint8"):
        reason = f"must be [experts, rows, groups, {PACKED_GROUP}] uint8"
        hint = "start from a release with gpt-oss's layout of MXFP4"
        raise release.refused(codes.name, reason, hint)
    if shape is None:
        reason = f"is {layout.words.partition(' ')[0]}, but not a matrix"
        raise release.refused(codes.name, reason, "compare the shard with the release: none quantizes vectors")
    scale = release.require(stored.scale, codes.name)
    shapes = layout.scale_shapes(shape)
    fitting = scale.shape if scale.shape in shapes else shapes[0]
    release.check(scale.name, fitting, layout.scale_dtypes, codes, layout.words)
    if stored.second is not None:
        second = release.require(stored.second, codes.name)
        one = second.shape if second.shape in ((), (1,), shape[:-2]) else ()
        release.check(second.name, one, ("float32",), codes, layout.words)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_dequantized(release, stored, shape, tensors)]

    # gpt-oss holds experts transposed in its plain weights.
    plain = (shape[0], shape[2], shape[1]) if layout.axes == "groups" else shape
    label = f"dequantize {layout.words.partition(' ')[0]}"
    return Step(stored.needed, (TensorSpec(stored.name, plain, "bfloat16"),), run, label)


def _dequantized(release: Release, stored: StoredWeight, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Tensor:
    import torch

    from ckptkit.quant.formats.floats.decode import dequantize, factors, has_nan

    codes, scales, *more = tensors
    layout, second = stored.layout, more[0] if more else None
    if scales.dtype is torch.uint8 and bool((scales > layout.max_exponent).any()):
        raise release.refused(
            stored.scale, f"has exponents above {layout.max_exponent}, which give NaN or infinity", DAMAGED
        )
    if second is not None and (not bool(second.isfinite().all()) or (layout.divides and not bool(second.all()))):
        raise release.refused(str(stored.second), "dequantizes to NaN or infinity", DAMAGED)
    largest = factors(layout, scales, second, shape) * layout.largest
    release.check_finite(stored.scale, largest.to(torch.bfloat16))
    if layout.number == E4M3 and has_nan(codes):
        raise release.refused(stored.codes.name, "has NaN, which some quantizers write for a block of zeros", DAMAGED)
    weight = dequantize(layout, codes, scales, second)
    return weight.transpose(-1, -2).contiguous() if layout.axes == "groups" else weight
