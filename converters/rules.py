"""The nouns of a mapping: a rule between name templates, and a model family made of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.dims import ModelDims
from converters.ops import Copy, Op


@dataclass(frozen=True)
class ParamMapping:
    """One rule: a Megatron tensor, the HF tensors it is made of with their shapes, and the op between them.

    Templates may hold `{layer}` and `{expert}`; `layers` says which layers the rule is for (None: it has no `{layer}`).
    Megatron names are those of the global, unstacked tensors: one a layer, and one an expert
    (`decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight`); the torch_dist reader and writer know how they lie on disk.
    `fp32` marks state that must never be rounded to a smaller dtype; `vocab` marks rows that Megatron may pad.
    """

    megatron: str
    hf: Mapping[str, tuple[int, ...]]
    op: Op = field(default_factory=Copy)
    layers: range | None = None
    fp32: bool = False
    vocab: bool = False

    def expand(self, experts: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every (Megatron name, HF names) pair of this rule for a model with that many routed experts."""
        for layer in self.layers if self.layers is not None else [0]:
            for expert in range(experts) if "{expert}" in self.megatron else [0]:
                at = {"layer": layer, "expert": expert}
                yield self.megatron.format(**at), tuple(name.format(**at) for name in self.hf)


@dataclass(frozen=True)
class ModelFamily:
    """What one kind of model is: its exact `model_type`s, how its config is read, and its rules."""

    model_types: tuple[str, ...]
    read_dims: Callable[[Mapping[str, Any]], ModelDims]
    mappings: Callable[[ModelDims], tuple[ParamMapping, ...]]
    dropped: Callable[[ModelDims], frozenset[str]] = lambda dims: frozenset()
