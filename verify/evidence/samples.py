"""Compares two checkpoints by samples: a few stretches of a few tensors, read without torch and bounded in bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.storage.read import FileExtent, read_into
from ckptkit.verify.evidence.folding import LAYER, group_by_pattern

MAX_TENSORS = 64
# From the start, the middle and the end of a tensor at most this many bytes: of both sides together 12 MiB.
STRETCHES, STRETCH_BYTES = 3, 32 << 10
# Tensors that lie outside the layers: a vision tower has hundreds.
_MAX_OUTSIDE = 8
# Experts of a kind among which is chosen.
_MAX_PER_PATTERN = 4096
# Below this cosine two matrices are not one before and after training; of fewer elements chance alone may give another.
_UNRELATED, _MIN_ELEMENTS = 0.5, 256
# A wider dtype, and those that a cast of it may give.
_CASTS = {("float32", "bfloat16"), ("float32", "float16")}

T = TypeVar("T")


class Stored(Protocol):
    """A checkpoint whose bytes can be found. `stretch`: from an element on, as far as they follow one another."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    def stretch(self, name: str, element: int) -> FileExtent | None: ...


@dataclass(frozen=True)
class SamplePair:
    """A tensor that both sides store in the same way, by its names there."""

    here: str
    there: str
    padded: bool = False  # one of them may have more rows


@dataclass
class Samples:
    """What was compared, by names of `here`."""

    compared: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    unrelated: list[str] = field(default_factory=list)  # differing matrices that training cannot explain
    nbytes: int = 0  # of one side
    left_out: Counter[str] = field(default_factory=Counter)  # tensors not compared, by reason


def samples_of(here: Stored, there: Stored, pairs: Iterable[SamplePair]) -> Samples:
    """Compares samples of the tensors that both sides store. In two dtypes, what a cast of the wider one gives.

    Raises CkptkitError where a file is damaged, and OSError where it cannot be read.
    """
    found = Samples()
    usable: dict[str, SamplePair] = {}
    for pair in pairs:
        mine, its = here.specs.get(pair.here), there.specs.get(pair.there)
        if mine is None or its is None:
            found.left_out["that one side does not store, or stores packed"] += 1
        elif mine.dtype != its.dtype and _CASTS.isdisjoint({(mine.dtype, its.dtype), (its.dtype, mine.dtype)}):
            found.left_out[f"in {' and '.join(sorted((mine.dtype, its.dtype)))}"] += 1
        elif mine.shape == its.shape or (pair.padded and mine.shape[1:] == its.shape[1:]):
            usable[pair.here] = pair
        else:
            found.left_out["of other shapes"] += 1
    for name in chosen(usable):
        _compare(here, there, usable[name], found)
    return found


def chosen(names: Iterable[str]) -> list[str]:
    """At most MAX_TENSORS of these names: some outside the layers, and then layer by layer one kind after another.

    The first and the last layer are among them, and so is every one where there are no more than that.
    """
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
    taken = _spread(outside, _MAX_OUTSIDE)
    return [*taken, *_in_turn([layers[layer] for layer in sorted(layers)], MAX_TENSORS - len(taken))]


def _in_turn(layers: Sequence[list[list[str]]], most: int) -> Iterator[str]:
    """Of each layer in turn another kind of tensor, and of that another expert, until there are enough."""
    layers = _spread(layers, most)
    for turn in range(max(map(len, layers), default=0)):
        for place, kinds in enumerate(layers):
            if most and turn < len(kinds):
                several = kinds[(place + turn) % len(kinds)]
                yield several[place * (len(several) - 1) // max(len(layers) - 1, 1)]
                most -= 1


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[number * (len(items) - 1) // (most - 1)] for number in range(most)]


def _compare(here: Stored, there: Stored, pair: SamplePair, found: Samples) -> None:
    """Compares up to STRETCHES stretches of a tensor, and adds what came of it to `found`."""
    one, other = here.specs[pair.here], there.specs[pair.there]
    elements = min(math.prod(one.shape), math.prod(other.shape))
    most = STRETCH_BYTES // max(ITEMSIZE[one.dtype], ITEMSIZE[other.dtype])
    equal, nbytes = True, 0
    floats: list[tuple[np.ndarray | None, np.ndarray | None]] = []
    for start in sorted({max(0, (elements - most) * place // (STRETCHES - 1)) for place in range(STRETCHES)}):
        mine, theirs = here.stretch(pair.here, start), there.stretch(pair.there, start)
        if mine is None or theirs is None or not elements:
            continue
        sizes = mine.nbytes // ITEMSIZE[one.dtype], theirs.nbytes // ITEMSIZE[other.dtype]
        count = min(most, elements - start, *sizes)
        left, right = _read(mine, count, one.dtype), _read(theirs, count, other.dtype)
        equal = equal and _same(left, right, one.dtype, other.dtype)
        floats.append((_floats(left, one.dtype), _floats(right, other.dtype)))
        nbytes += left.nbytes
    if not nbytes:
        found.left_out["that are not stored as contiguous rows"] += 1
        return
    found.compared.append(pair.here)
    found.nbytes += nbytes
    if not equal:
        found.differing.append(pair.here)
        if len(one.shape) > 1 and LAYER.search(pair.here) and _unrelated(floats):
            found.unrelated.append(pair.here)


def _unrelated(floats: Iterable[tuple[np.ndarray | None, np.ndarray | None]]) -> bool:
    """Whether there is enough of two tensors to say that they are not one matrix, before and after training."""
    pairs = [(one, other) for one, other in floats if one is not None and other is not None]
    with np.errstate(all="ignore"):  # elements that are not finite are for other checks
        sums = [[float(a @ b), float(a @ a), float(b @ b)] for a, b in pairs]
    product, one, other = (sum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0, 0.0)
    norm = math.sqrt(one) * math.sqrt(other)
    enough = sum(a.size for a, _ in pairs) >= _MIN_ELEMENTS
    return enough and math.isfinite(norm) and norm > 0 and product < _UNRELATED * norm


def _read(extent: FileExtent, count: int, dtype: str) -> np.ndarray:
    """The first elements of an extent as unsigned numbers of their size, [count]."""
    content = np.empty(count, {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[ITEMSIZE[dtype]])
    if read_into(extent.path, content.view(np.uint8).data, extent.offset) < content.nbytes:
        raise CkptkitError(f"{extent.path} ends too early", "the file is truncated; copy it again")
    return content


def _floats(content: np.ndarray, dtype: str) -> np.ndarray | None:
    """Elements as float64; None of a dtype that is quantized or no float."""
    if dtype == "bfloat16":
        return (content.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kind = {"float16": np.float16, "float32": np.float32}.get(dtype)
    return None if kind is None else content.view(kind).astype(np.float64)


def _same(here: np.ndarray, there: np.ndarray, dtype: str, other: str) -> bool:
    """Whether elements of two dtypes are equal, those of the wider one cast to the narrower one."""
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
    # Which NaN a cast gives depends on the processor.
    nan = ((narrowed & 0x7FFF) > infinity) & ((there & 0x7FFF) > infinity)
    return bool(((narrowed == there) | nan).all())
