"""Arranges the profiles of a model by layer, and defines what a suspicion is."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from converters.config.dims import ModelDims
from converters.hf_names import GATE_UP_DOWN
from verify.evidence.folding import LAYER
from verify.evidence.plausible.profile import Array, Profile

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Suspicion:
    """Tensors that do not look like what their names say. Suspicions with the same two texts are one finding."""

    names: tuple[str, ...]
    expected: str  # how their siblings look
    actual: str  # how they look


@dataclass(frozen=True)
class Layers:
    """The profiles of a model, by layer and the rest of the name (`self_attn.q_proj.weight`)."""

    dims: ModelDims
    profiles: Mapping[int, Mapping[str, Profile]]
    names: Mapping[tuple[int, str], str]  # whole names
    experts: tuple[str, ...] = GATE_UP_DOWN  # what the model calls gate, up and down of an expert
    routers: frozenset[str] = frozenset()  # the rest of a router's name

    def name(self, layer: int, *tails: str) -> tuple[str, ...]:
        """Whole names of tensors of a layer."""
        return tuple(self.names[layer, tail] for tail in tails)

    def of(self, tail: str) -> Mapping[int, Profile]:
        """A tensor in every layer that has it, in order."""
        return {layer: found[tail] for layer, found in sorted(self.profiles.items()) if tail in found}

    def matrices(self) -> Iterator[tuple[str, str, Profile]]:
        """Every matrix: its name, its kind (the rest of its name without an expert's number), its profile."""
        for layer, found in sorted(self.profiles.items()):
            for tail, profile in found.items():
                if profile.vector is None:
                    yield self.names[layer, tail], _EXPERT.sub("#", tail), profile


def profiled_layers(
    profiles: Mapping[str, Profile], dims: ModelDims, experts: tuple[str, ...], routers: Sequence[str]
) -> Layers:
    """The profiles of decoder layers; multi-token prediction layers, which stand behind them, are left out."""
    found: dict[int, dict[str, Profile]] = defaultdict(dict)
    names = {}
    for name, profile in profiles.items():
        if (match := LAYER.match(name)) and int(match[1]) < dims.layers:
            found[int(match[1])][name[match.end() :]] = profile
            names[int(match[1]), name[match.end() :]] = name
    tails = frozenset(name[match.end() :] for name in routers if (match := LAYER.match(name)))
    return Layers(dims, found, names, experts, tails)


def correlation(one: Array, other: Array) -> float:
    """Pearson's; 0 where one of the two does not vary."""
    a, b = (values.astype(np.float64) - values.mean() for values in (one, other))
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else 0.0


def neighbours(layer: int, layers: Sequence[int]) -> Sequence[int]:
    """The four of `layers` that stand nearest to a layer, or all others where there are fewer."""
    return sorted((other for other in layers if other != layer), key=lambda other: abs(other - layer))[:4]


def typical(found: Sequence[Array]) -> Array:
    """The median of each number, which one of them that is wrong does not move far."""
    return np.asarray(np.median(found, axis=0))
