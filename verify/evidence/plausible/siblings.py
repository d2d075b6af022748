"""Finds tensors that differ from those of the neighbouring layers as one known mistake makes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations

import numpy as np

from verify.evidence.plausible.balance import rotary_of
from verify.evidence.plausible.layers import Layers, Suspicion, correlation, neighbours, typical
from verify.evidence.plausible.profile import Array, Profile

# Margins as measured: docs/plausibility.md.
_EXCHANGED = 0.6  # of the distance from the norms around that an exchange may leave; in sound layers it leaves 0.92
_SHIFTED = 0.35  # and adding or taking away one; in sound layers it leaves 2.9
_MIN_ROTARY = 32  # rotary dimensions of a head
_ROTARY_FITS, _ROTARY_BETTER = 0.6, 0.25  # in another order; sound layers fit so with 0.49 at most
# Standard deviations from random numbers: of a new matrix at most (0.3% of random ones have more), of its siblings at
# least. Trained routers, which have the least, have 7.6 and more.
_FRESH, _STRUCTURED = 3.0, 7.0
UNTRAINED = 6.0  # and in the median of all matrices; trained models have 23 to 460
_MIN_NUMBERS, _MIN_COUNTED = 4, 32


def odd_norms(layers: Layers) -> Iterator[Suspicion]:
    """Two norms of a layer that fit the neighbours better exchanged, and one that fits them one higher or lower."""
    tails = dict.fromkeys(
        tail for found in layers.profiles.values() for tail, one in found.items() if one.vector is not None
    )
    norms = {tail: layers.of(tail) for tail in tails}
    norms = {tail: found for tail, found in norms.items() if len(found) >= 3}
    for tail, found in norms.items():
        for layer, norm in found.items():
            around, own = _around(found, layer, _vector), _vector(norm)
            for step in (1.0, -1.0):
                if _distance(own + step, around) <= _SHIFTED * _distance(own, around):
                    actual = f"it looks like theirs {'less' if step > 0 else 'plus'} 1"
                    yield Suspicion(layers.name(layer, tail), "a norm like those of the neighbouring layers", actual)
    for one, other in combinations(norms, 2):
        for layer in norms[one].keys() & norms[other].keys():
            mine, theirs = norms[one][layer], norms[other][layer]
            if mine.shape == theirs.shape:
                mine_around, theirs_around = (_around(norms[tail], layer, _log) for tail in (one, other))
                now = _distance(_log(mine), mine_around) + _distance(_log(theirs), theirs_around)
                then = _distance(_log(mine), theirs_around) + _distance(_log(theirs), mine_around)
                if then <= _EXCHANGED * now:
                    expected = "norms like those of the neighbouring layers"
                    yield Suspicion(layers.name(layer, one, other), expected, "the two look exchanged")


def _vector(norm: Profile) -> Array:
    return np.zeros(0, np.float32) if norm.vector is None else norm.vector


def _log(norm: Profile) -> Array:
    return np.asarray(np.log(np.abs(_vector(norm)).clip(1e-3)))


def _around(found: Mapping[int, Profile], layer: int, view: Callable[[Profile], Array]) -> Array:
    return typical([view(found[other]) for other in neighbours(layer, list(found))])


def _distance(one: Array, other: Array) -> float:
    return float(np.sqrt(np.mean((one - other) ** 2)))


def odd_rotary(layers: Layers) -> Iterator[Suspicion]:
    """Layers whose q and k fit those around with the halves of each head taken in turn, or in pairs put apart."""
    tails = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
    dims, turned = layers.dims, rotary_of(layers.dims)
    rows = {tails[0]: dims.heads * dims.head_dim, tails[1]: dims.groups * dims.head_dim}  # latent attention has others
    heads = {
        tail: {
            layer: _head(one, dims.head_dim, turned)
            for layer, one in layers.of(tail).items()
            if one.shape[0] == len(one.rows) == rows[tail]
        }
        for tail in tails
    }
    shared = sorted(heads[tails[0]].keys() & heads[tails[1]].keys())
    if turned < _MIN_ROTARY or len(shared) < 3:
        return
    in_turn = np.arange(turned).reshape(2, -1).T.reshape(-1)
    orders = {"": np.arange(turned), "taken in turn": in_turn, "put apart": np.argsort(in_turn)}
    for layer in shared:
        around = {tail: typical([found[other] for other in neighbours(layer, shared)]) for tail, found in heads.items()}
        fits = {
            how: sum(correlation(found[layer][order], around[tail]) for tail, found in heads.items()) / len(heads)
            for how, order in orders.items()
        }
        own = fits.pop("")
        best = max(fits, key=lambda how: fits[how])
        if fits[best] >= _ROTARY_FITS and fits[best] - own >= _ROTARY_BETTER:
            actual = f"the halves of each head look {'de-interleaved' if best == 'taken in turn' else 'interleaved'}"
            yield Suspicion(layers.name(layer, *tails), "rotary halves like those of the neighbouring layers", actual)


def _head(matrix: Profile, head_dim: int, turned: int) -> Array:
    """The sizes of a head's turned rows, in the mean over all heads."""
    heads = matrix.rows.reshape(-1, head_dim)[:, :turned]
    return np.asarray((heads - heads.mean(1, keepdims=True)).mean(0))


def structure(matrix: Profile) -> float | None:
    """How far rows and columns differ in size, in standard deviations of what independent normal numbers would do.

    Of a router also how similar its rows are. None for a matrix that is too small to tell.
    """
    found = [
        (float(np.var(sizes, dtype=np.float64)) / _spread(numbers) - 1) * ((len(sizes) - 1) / 2) ** 0.5
        for sizes, numbers in ((matrix.rows, matrix.width), (matrix.columns, matrix.height))
        if numbers >= _MIN_NUMBERS and len(sizes) >= _MIN_NUMBERS
    ]
    if matrix.likeness is not None:
        found.append((matrix.likeness * matrix.width - 1) * (matrix.shape[0] * (matrix.shape[0] - 1) / 4) ** 0.5)
    return sum(found) / len(found) ** 0.5 if found and matrix.width >= _MIN_COUNTED else None


def _spread(numbers: int) -> float:
    """The variance of the logarithm of the mean square of normal numbers: trigamma(numbers / 2)."""
    half, total = numbers / 2, 0.0
    while half < 6:
        total, half = total + half**-2, half + 1
    return total + 1 / half + 1 / (2 * half**2) + 1 / (6 * half**3)


def fresh(layers: Layers) -> tuple[list[Suspicion], float]:
    """Matrices that look like random numbers where their siblings do not; and how much structure the median one has."""
    kinds: dict[str, dict[str, float]] = defaultdict(dict)
    for name, kind, profile in layers.matrices():
        if (far := structure(profile)) is not None:
            kinds[kind][name] = far
    every = [value for found in kinds.values() for value in found.values()]
    median = float(np.median(every)) if every else 0.0
    suspicions = []
    for kind, found in kinds.items():
        names = [name for name, value in found.items() if value <= _FRESH]
        others = [value for value in found.values() if value > _FRESH]
        sound = len(others) >= 3 and min(others) >= _STRUCTURED
        random = not others and len(names) >= 4 and kind in layers.routers and median >= _STRUCTURED
        if sound or random:
            expected = "rows and columns that differ in size, as trained ones do"
            actual = "it looks like random numbers, as a new weight is before training"
            suspicions += [Suspicion((name,), expected, actual) for name in names]
    return suspicions, median
