"""Finds layers whose rows and columns are not balanced as training leaves them, and the exchange that explains it.

A model computes the same where a row of up is scaled and the column of down that reads it is scaled back. The same goes
for a row of v and the columns of o behind it, and for the rotary pairs of q and of k, but not for gate and up, or for k
and v. Gradients keep the difference of two such sizes, and weight decay takes it to zero, so trained rows and columns
that answer each other are of one size: their logarithms correlate, and with the wrong partner they do not.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from converters.config.dims import ModelDims
from converters.hf_names import GATE_UP_DOWN
from verify.evidence.plausible.layers import Layers, Suspicion, correlation
from verify.evidence.plausible.profile import Array, Profile

# As measured (docs/plausibility.md) on eight trained models: in sound layers the wrong partner, where it fits at all,
# correlates better than the right one by 0.11 at most. Exchanged tensors show 0.4 and more in nine of ten layers.
BETTER = 0.4
FITS = 0.4
_SURE = 4.0  # standard deviations of a correlation of independent numbers
_DISTINGUISHED = 0.25  # of a whole model: with less in the median layer, right and wrong cannot be distinguished
_ATTENTION = tuple(f"self_attn.{part}_proj.weight" for part in "qkvo")
_Q, _K, _V, _O = _ATTENTION


@dataclass(frozen=True)
class Balance:
    """How well the sizes of tensors of a layer correlate as named, and as exchanged."""

    layer: int
    tails: tuple[str, ...]
    own: float  # as named
    other: float  # as exchanged
    count: int  # numbers that were correlated

    @property
    def wrong(self) -> bool:
        """Whether the exchange explains what the names do not."""
        sure = self.other * self.count**0.5 >= _SURE
        return sure and self.other >= FITS and self.other - self.own >= BETTER


def unbalanced(layers: Layers) -> tuple[list[Suspicion], list[str]]:
    """Finds exchanges; and a line each on those that would and would not show in this model."""
    found: dict[str, list[Balance]] = defaultdict(list)
    for layer, profiles in sorted(layers.profiles.items()):
        for question, balance in (*_attention(layer, profiles, layers.dims), *_mlps(layer, profiles, layers.experts)):
            found[question].append(balance)
    suspicions: dict[int, list[tuple[float, Suspicion]]] = defaultdict(list)
    shown, hidden = [], []
    for question, balances in found.items():
        apart = statistics.median(one.own - one.other for one in balances)
        if abs(apart) < _DISTINGUISHED:
            hidden.append(question)
            continue
        shown.append(question)
        for one in balances:
            if one.wrong:
                expected = "rows and columns of the same size as their counterparts (training balances them)"
                actual = f"it looks like {question}: the correlation would be {one.other:.2f} and is {one.own:.2f}"
                suspicion = Suspicion(layers.name(one.layer, *one.tails), expected, actual)
                suspicions[one.layer].append((one.other - one.own, suspicion))
    lines = [
        f"{what}: {', '.join(found)}"
        for what, found in (("would be found", shown), ("cannot be told", hidden))
        if found
    ]
    return [one for layer in sorted(suspicions) for one in _best(suspicions[layer])], lines


def _best(found: list[tuple[float, Suspicion]]) -> Iterator[Suspicion]:
    """Leaves out what a better explanation of the same tensors covers."""
    taken: set[str] = set()
    for _, suspicion in sorted(found, key=lambda pair: -pair[0]):
        if taken.isdisjoint(suspicion.names):
            taken.update(suspicion.names)
            yield suspicion


def _mlps(layer: int, profiles: Mapping[str, Profile], experts: tuple[str, ...]) -> Iterator[tuple[str, Balance]]:
    """None of an MLP without a gate."""
    for tail in profiles:
        block, _, part = tail.removesuffix(".weight").rpartition(".")
        for gate, *others in {experts, GATE_UP_DOWN}:
            tails = tuple(f"{block}.{one}.weight" for one in (gate, *others))
            if part == gate and len(tails) == len(GATE_UP_DOWN) and profiles.keys() >= set(tails):
                one, other, answer = (profiles[name] for name in tails)
                if one.shape == other.shape == answer.shape[::-1]:
                    own, alternative = (correlation(rows, answer.columns) for rows in (other.rows, one.rows))
                    yield "gate and up exchanged", Balance(layer, tails[:2], own, alternative, len(answer.columns))


def _attention(layer: int, profiles: Mapping[str, Profile], dims: ModelDims) -> Iterator[tuple[str, Balance]]:
    """None of a layer without plain q, k, v and o, or with heads of another number than the config's."""
    wide, narrow = dims.heads * dims.head_dim, dims.groups * dims.head_dim
    found = [profiles[tail] for tail in _ATTENTION if tail in profiles]
    if len(found) < 4 or [*(len(one.rows) for one in found[:3]), len(found[3].columns)] != [wide, narrow, narrow, wide]:
        return
    q, k, v, o = found
    pairs, values = _pairs(q.rows, k.rows, dims), _values(v.rows, o.columns, dims)
    turned = (pairs + values) / 2
    other = (_pairs(q.rows, v.rows, dims) + _values(k.rows, o.columns, dims)) / 2
    yield "k and v exchanged", Balance(layer, (_K, _V), turned, other, narrow // 2)
    if q.square and o.square:
        other = (_pairs(o.rows, k.rows, dims) + _values(v.rows, q.columns, dims)) / 2
        yield "q and o exchanged", Balance(layer, (_Q, _O), turned, other, narrow // 2)
        yield "q transposed", Balance(layer, (_Q,), pairs, _pairs(q.columns, k.rows, dims), narrow // 2)
        yield "o transposed", Balance(layer, (_O,), values, _values(v.rows, o.rows, dims), narrow)


def _values(rows: Array, columns: Array, dims: ModelDims) -> float:
    """Rows of v against the columns of o that read them, those of a group's heads together."""
    answers = np.exp(columns).reshape(dims.groups, -1, dims.head_dim).mean(1)
    return correlation(rows, np.log(answers).reshape(-1))


def _pairs(q: Array, k: Array, dims: ModelDims) -> float:
    """Rotary pairs of q, those of a group's heads together, against those of k."""
    asked = _paired(np.exp(q).reshape(dims.groups, -1, dims.head_dim).mean(1), dims)
    return correlation(np.log(asked).reshape(-1), np.log(_paired(np.exp(k).reshape(dims.groups, -1), dims)).reshape(-1))


def _paired(heads: Array, dims: ModelDims) -> Array:
    """Sizes [groups, head_dim], each the mean of the two that turn together."""
    turned = rotary_of(dims)
    first = heads[:, :turned].reshape(len(heads), *((-1, 2) if dims.rope_interleaved else (2, -1)))
    axis = 2 if dims.rope_interleaved else 1
    return np.concatenate([np.repeat(first.mean(axis), 2, axis=1), heads[:, turned:]], axis=1)


def rotary_of(dims: ModelDims) -> int:
    """The dimensions of a head that are turned."""
    return int(dims.head_dim * dims.rotary_fraction) // 2 * 2
