"""Mapping rules between HF and Megatron name templates, and the name prefix of a block of rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.ops.basic import Copy, Op
from ckptkit.converters.ops.shapes import Shape, shape_of


@dataclass(frozen=True)
class ParamMapping:
    """One rule: a Megatron tensor, its HF tensors with their shapes, and the op between them.

    Templates may contain `{layer}` and `{expert}`, or `{2*layer}` and `{2*layer+1}` for HybridModel, which has two
    layers for each HF layer. `layers`: the layers of the rule, or None if its templates have no layer.
    Megatron names are global and unstacked, one per layer and expert
    (`decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight`); the torch_dist reader and writer handle the layout on
    disk. `fp32`: must never be rounded to a smaller dtype. `indices`: a table of integers. `vocab`: Megatron may pad
    the rows. `upcast`: the Megatron tensor has the next wider dtype, because the op would round in the HF dtype.
    `copies`: HF tensors that may repeat the only tensor of `hf` in a release. `kind`: the class of the HF modules with
    these weights of two or more axes: Linear, Embedding, Router, Conv1d, Experts, or another class name. Only a Linear
    may become INT4.
    """

    megatron: str
    hf: Mapping[str, Shape]
    op: Op = field(default_factory=Copy)
    layers: Sequence[int] | None = None
    fp32: bool = False
    indices: bool = False
    vocab: bool = False
    upcast: bool = False
    copies: tuple[str, ...] = ()
    kind: str = "Linear"

    @cached_property
    def megatron_shape(self) -> Shape:
        """Shape of the Megatron tensor in every layer and expert. Raises CkptkitError like `shape_of`."""
        return shape_of(self.op.merge, self.hf.values())

    def expand(self, experts: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every (Megatron name, HF names) pair of this rule for a model with that many routed experts."""
        several = (self.names_of(template, experts) for template in (self.megatron, *self.hf))
        for megatron, *names in zip(*several, strict=True):
            yield megatron, tuple(names)

    def names_of(self, template: str, experts: int) -> Iterator[str]:
        """All names of one template of this rule, by layer and expert."""
        for layer in self.layers if self.layers is not None else [0]:
            numbered = template.replace("{layer}", str(layer)).replace("{2*layer}", str(2 * layer))
            before, expert, after = numbered.replace("{2*layer+1}", str(2 * layer + 1)).partition("{expert}")
            yield from (f"{before}{number}{after}" for number in range(experts)) if expert else (before,)


@dataclass(frozen=True)
class NamePrefix:
    """The prefix of a block's names on both sides, and its layers, or None if the prefix has no `{layer}`."""

    megatron: str
    hf: str
    layers: Sequence[int] | None

    def rule(
        self,
        megatron: str,
        hf: Mapping[str, Shape],
        op: Op | None = None,
        *,
        fp32: bool = False,
        indices: bool = False,
        upcast: bool = False,
        kind: str = "Linear",
    ) -> ParamMapping:
        """The rule between names with this prefix."""
        names = {self.hf + name: shape for name, shape in hf.items()}
        return ParamMapping(
            self.megatron + megatron, names, op or Copy(), self.layers, fp32, indices, upcast=upcast, kind=kind
        )

    def tensors(
        self, shapes: Mapping[str, Shape], *, fp32: bool = False, kind: str = "Linear"
    ) -> tuple[ParamMapping, ...]:
        """One rule per tensor of a model without Megatron names, for `with_hf_names`."""
        return tuple(self.rule("", {name: shape}, fp32=fp32, kind=kind) for name, shape in shapes.items())


def with_hf_names(rules: Iterable[ParamMapping]) -> tuple[ParamMapping, ...]:
    """Rules with HF names on both sides, for models without settled Megatron names.

    Multi-token prediction layers have the prefix `mtp.`, like Megatron's.
    """
    return tuple(
        replace(rule, megatron="mtp." * rule.megatron.startswith("mtp.") + name, hf={name: shape}, op=Copy())
        for rule in rules
        for name, shape in rule.hf.items()
    )


def decoder(dims: ModelDims, layers: Sequence[int]) -> NamePrefix:
    """The prefix of these decoder layers."""
    return NamePrefix("decoder.layers.{layer}.", dims.root + "layers.{layer}.", layers)
