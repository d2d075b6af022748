"""The nouns of a mapping: a rule between name templates, where a block of rules stands, and a model family made of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from converters.config.dims import ModelDims
from converters.ops.basic import Copy, Op
from converters.ops.shapes import Shape, shape_of


@dataclass(frozen=True)
class ParamMapping:
    """One rule: a Megatron tensor, the HF tensors it is made of with their shapes, and the op between them.

    Templates may hold `{layer}` and `{expert}`; `layers` says which layers the rule is for (None: it has no `{layer}`).
    Megatron names are those of the global, unstacked tensors: one a layer, and one an expert
    (`decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight`); the torch_dist reader and writer know how they lie on disk.
    `fp32` marks state that must never be rounded to a smaller dtype; `vocab` marks rows that Megatron may pad; `wide` marks
    a Megatron tensor kept in the next wider dtype, because its op would round in the HF tensor's own.
    `copies` names HF tensors that, where a release has them, repeat the only tensor of `hf`.
    """

    megatron: str
    hf: Mapping[str, Shape]
    op: Op = field(default_factory=Copy)
    layers: Sequence[int] | None = None
    fp32: bool = False
    vocab: bool = False
    wide: bool = False
    copies: tuple[str, ...] = ()

    @cached_property
    def megatron_shape(self) -> Shape:
        """Shape of the Megatron tensor, from running the op; the same in every layer and expert. Raises CkptkitError as `shape_of`."""
        return shape_of(self.op.merge, self.hf.values())

    def expand(self, experts: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every (Megatron name, HF names) pair of this rule for a model with that many routed experts."""
        several = range(experts) if "{expert}" in self.megatron else [0]
        for layer in self.layers if self.layers is not None else [0]:
            megatron, *names = (name.replace("{layer}", str(layer)) for name in (self.megatron, *self.hf))
            for expert in map(str, several):
                yield megatron.replace("{expert}", expert), tuple(name.replace("{expert}", expert) for name in names)


@dataclass(frozen=True)
class Place:
    """Where a block of rules stands: the prefix of its names on both sides, and its layers (None: one place, no `{layer}`)."""

    megatron: str
    hf: str
    layers: Sequence[int] | None

    def rule(
        self, megatron: str, hf: Mapping[str, Shape], op: Op | None = None, *, fp32: bool = False, wide: bool = False
    ) -> ParamMapping:
        """The rule between names of this place."""
        names = {self.hf + name: shape for name, shape in hf.items()}
        return ParamMapping(self.megatron + megatron, names, op or Copy(), self.layers, fp32=fp32, wide=wide)


def decoder(dims: ModelDims, layers: Sequence[int]) -> Place:
    """These layers of the decoder."""
    return Place("decoder.layers.{layer}.", dims.root + "layers.{layer}.", layers)


@dataclass(frozen=True)
class FusedExperts:
    """How a family keeps all experts of a layer in one tensor: `gate_up_proj` and `down_proj`, and their biases `*_proj_bias`.

    By default a weight is [experts, rows, columns], the rows of gate above those of up. `transposed`: [experts, columns, rows];
    `interleaved`: gate and up take turns, row by row. `always`: no reader knows these experts one by one. `renamed`: a fused
    save calls the whole block otherwise than the release does, and is refused.
    """

    transposed: bool = False
    interleaved: bool = False
    always: bool = False
    renamed: bool = False


@dataclass(frozen=True)
class ModelFamily:
    """What one kind of model is: its exact `model_type`s, how its config is read, and its rules.

    `architectures`: the classes that its language models are published under, as config.json spells them.

    `mappings` names Megatron tensors as megatron-core's own modules do; `dialects` holds the rules of stacks that train with
    modules of their own, by the stack's name. `carried`: prefixes of HF names (a vision tower) that no Megatron language
    model holds; they are kept beside the Megatron weights and come back byte for byte. `carried_ends`: the same for endings of
    names (values that every reader computes for itself, in releases that have them). `dropped`: names that are not
    converted on purpose. `fused`: what its fused experts look like. `language_models`: the `model_type`s of a language model alone that
    may be stored under the names of the multimodal model, with the `model_type` of that.
    """

    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    read_dims: Callable[[Mapping[str, Any]], ModelDims]
    mappings: Callable[[ModelDims], tuple[ParamMapping, ...]]
    dialects: Mapping[str, Callable[[ModelDims], tuple[ParamMapping, ...]]] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    carried_ends: tuple[str, ...] = ()
    dropped: Callable[[ModelDims], frozenset[str]] = lambda dims: frozenset()
    fused: FusedExperts = FusedExperts()
    language_models: Mapping[str, str] = field(default_factory=dict)

    def carries(self, name: str) -> bool:
        """Whether a tensor of the release is only carried."""
        return name.startswith(self.carried) or name.endswith(self.carried_ends)
