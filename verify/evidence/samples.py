"""Compares samples of two checkpoints: a few stretches of a few tensors, read without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.storage.read import FileExtent, read_into
from ckptkit.verify.evidence.folding import LAYER, group_by_pattern

MAX_TENSORS = 64
STRETCHES, STRETCH_BYTES = 3, 32 << 10  # at the start, in the middle and at the end: 12 MiB for both sides
_MAX_OUTSIDE = 8  # tensors outside the layers: a vision tower has hundreds
_MAX_PER_PATTERN = 4096  # candidates of one pattern, which may be experts
# Training does not move a matrix below this cosine. Fewer elements may have it by chance.
_UNRELATED, _MIN_ELEMENTS = 0.5, 256
_CASTS = {("float32", "bfloat16"), ("float32", "float16")}  # a wider dtype and a narrower one

T = TypeVar("T")


class Stored(Protocol):
    """A checkpoint on disk. `stretch`: the contiguous bytes from an element on."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    def stretch(self, name: str, element: int) -> FileExtent | None: ...


@dataclass(frozen=True)
class SamplePair:
    """The names of a tensor that both sides store in the same layout."""

    here: str
    there: str
    padded: bool = False  # one side may have more rows


@dataclass
class Samples:
    """The outcome, by names of `here`."""

    compared: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    unrelated: list[str] = field(default_factory=list)  # differing matrices that training cannot explain
    nbytes: int = 0  # of one side
    left_out: Counter[str] = field(default_factory=Counter)  # tensors not compared, by reason


def samples_of(here: Stored, there: Stored, pairs: Iterable[SamplePair]) -> Samples:
    """Compares samples after a cast to the narrower dtype. Raises CkptkitError for a damaged file, and OSError."""
    samples = Samples()
    usable: dict[str, SamplePair] = {}
    for pair in pairs:
        spec, other = here.specs.get(pair.here), there.specs.get(pair.there)
        if spec is None or other is None:
            samples.left_out["are missing or packed on one side"] += 1
        elif spec.dtype != other.dtype and _CASTS.isdisjoint({(spec.dtype, other.dtype), (other.dtype, spec.dtype)}):
            samples.left_out[f"have dtypes {' and '.join(sorted((spec.dtype, other.dtype)))}"] += 1
        elif spec.shape == other.shape or (pair.padded and spec.shape[1:] == other.shape[1:]):
            usable[pair.here] = pair
        else:
            samples.left_out["have different shapes"] += 1
    for name in chosen(usable):
        _compare(here, there, usable[name], samples)
    return samples


def chosen(names: Iterable[str]) -> list[str]:
    """At most MAX_TENSORS names: some outside layers, then another kind of each layer, with the first and the last."""
    outside: list[str] = []
    layers: dict[int, list[list[str]]] = {}
    for group in group_by_pattern(names):
        inside: dict[int, list[str]] = {}
        for name in group[:: math.ceil(len(group) / _MAX_PER_PATTERN)]:
            if (match := LAYER.search(name)) is not None:
                inside.setdefault(int(match[1]), []).append(name)
        for layer, several in inside.items():
            layers.setdefault(layer, []).append(several)
        outside += [] if inside else [group[len(group) // 2]]
    samples = _spread(outside, _MAX_OUTSIDE)
    most = MAX_TENSORS - len(samples)
    return [*samples, *islice(_alternate(_spread([layers[layer] for layer in sorted(layers)], most)), most)]


def _alternate(layers: Sequence[list[list[str]]]) -> Iterator[str]:
    """Yields a name of each layer in turn, every time of another kind of tensor and another expert."""
    for turn in range(max(map(len, layers), default=0)):
        for index, kinds in enumerate(layers):
            if turn < len(kinds):
                names = kinds[(index + turn) % len(kinds)]
                yield names[index * (len(names) - 1) // max(len(layers) - 1, 1)]


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items at equal distances, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[number * (len(items) - 1) // (most - 1)] for number in range(most)]


def _compare(here: Stored, there: Stored, pair: SamplePair, samples: Samples) -> None:
    """Compares up to STRETCHES stretches of a tensor, and adds the outcome to `samples`."""
    spec_a, spec_b = here.specs[pair.here], there.specs[pair.there]
    elements = min(math.prod(spec_a.shape), math.prod(spec_b.shape))
    most = STRETCH_BYTES // max(ITEMSIZE[spec_a.dtype], ITEMSIZE[spec_b.dtype])
    equal, nbytes = True, 0
    floats: list[tuple[np.ndarray | None, np.ndarray | None]] = []
    for start in sorted({max(0, (elements - most) * part // (STRETCHES - 1)) for part in range(STRETCHES)}):
        extent_a, extent_b = here.stretch(pair.here, start), there.stretch(pair.there, start)
        if extent_a is None or extent_b is None or not elements:
            continue
        sizes = extent_a.nbytes // ITEMSIZE[spec_a.dtype], extent_b.nbytes // ITEMSIZE[spec_b.dtype]
        count = min(most, elements - start, *sizes)
        a, b = _read(extent_a, count, spec_a.dtype), _read(extent_b, count, spec_b.dtype)
        equal = equal and _same(a, b, spec_a.dtype, spec_b.dtype)
        floats.append((_floats(a, spec_a.dtype), _floats(b, spec_b.dtype)))
        nbytes += a.nbytes
    if not nbytes:
        samples.left_out["are not stored as contiguous rows"] += 1
        return
    samples.compared.append(pair.here)
    samples.nbytes += nbytes
    if not equal:
        samples.differing.append(pair.here)
        if len(spec_a.shape) > 1 and LAYER.search(pair.here) and _unrelated(floats):
            samples.unrelated.append(pair.here)


def _unrelated(floats: Iterable[tuple[np.ndarray | None, np.ndarray | None]]) -> bool:
    """Whether two tensors cannot be one matrix before and after training; False if they are too small to tell."""
    pairs = [(a, b) for a, b in floats if a is not None and b is not None]
    with np.errstate(all="ignore"):  # other checks report elements that are not finite
        sums = [[float(a @ b), float(a @ a), float(b @ b)] for a, b in pairs]
    product, square_a, square_b = (sum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0, 0.0)
    norm = math.sqrt(square_a) * math.sqrt(square_b)
    is_large = sum(a.size for a, _ in pairs) >= _MIN_ELEMENTS
    return is_large and math.isfinite(norm) and norm > 0 and product < _UNRELATED * norm


def _read(extent: FileExtent, count: int, dtype: str) -> np.ndarray:
    """The first `count` elements of an extent as unsigned integers of their size."""
    content = np.empty(count, {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[ITEMSIZE[dtype]])
    if read_into(extent.path, content.view(np.uint8).data, extent.offset) < content.nbytes:
        raise CkptkitError(f"{extent.path} is too short", "copy the file again: it is truncated")
    return content


def _floats(content: np.ndarray, dtype: str) -> np.ndarray | None:
    """Elements as float64, or None for quantized dtypes and integers."""
    if dtype == "bfloat16":
        return (content.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kind = {"float16": np.float16, "float32": np.float32}.get(dtype)
    return None if kind is None else content.view(kind).astype(np.float64)


def _same(here: np.ndarray, there: np.ndarray, dtype: str, other: str) -> bool:
    """Whether elements are equal after a cast to the narrower of both dtypes."""
    if dtype == other:
        return bool(np.array_equal(here, there))
    if (dtype, other) not in _CASTS:
        here, there, other = there, here, dtype
    if other == "bfloat16":  # rounded to nearest, ties to even, as torch does; NaN stays NaN
        rounded = (here.astype(np.uint64) + 0x7FFF + ((here >> 16) & 1)) >> 16
        narrowed = np.where((here & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).astype(np.uint16)
    else:
        with np.errstate(over="ignore"):
            narrowed = here.view(np.float32).astype(np.float16).view(np.uint16)
    infinity = 0x7F80 if other == "bfloat16" else 0x7C00
    # The bits of a NaN after a cast depend on the processor.
    nan = ((narrowed & 0x7FFF) > infinity) & ((there & 0x7FFF) > infinity)
    return bool(((narrowed == there) | nan).all())
