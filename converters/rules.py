"""The nouns of a mapping: a rule between name templates, and where a block of rules stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.ops.basic import Copy, Op
from ckptkit.converters.ops.shapes import Shape, shape_of


@dataclass(frozen=True)
class ParamMapping:
    """One rule: a Megatron tensor, the HF tensors it is made of with their shapes, and the op between them.

    Templates may hold `{layer}` and `{expert}`; of HybridModel, which has two layers for one, `{2*layer}` and
    `{2*layer+1}`. `layers` says which layers the rule is for (None: its templates have no layer).
    Megatron names are those of the global, unstacked tensors: one a layer, and one an expert
    (`decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight`); the torch_dist reader and writer know how they lie on
    disk. `fp32` marks state that must never be rounded to a smaller dtype; `indices` marks a table of whole numbers;
    `vocab` marks rows that Megatron may pad; `upcast` marks a Megatron tensor kept in the next wider dtype, because its
    op would round in the HF tensor's own.
    `copies` names HF tensors that, where a release has them, repeat the only tensor of `hf`. `kind`: the class of the
    HF modules whose weights with two or more axes these are: Linear, Embedding, Router, Conv1d, Experts, or another's
    name. Only a Linear may become INT4.
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
        """Shape of the Megatron tensor, from running the op; the same in every layer and expert.

        Raises CkptkitError as `shape_of`.
        """
        return shape_of(self.op.merge, self.hf.values())

    def expand(self, experts: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every (Megatron name, HF names) pair of this rule for a model with that many routed experts."""
        several = (self.names_of(template, experts) for template in (self.megatron, *self.hf))
        for megatron, *names in zip(*several, strict=True):
            yield megatron, tuple(names)

    def names_of(self, template: str, experts: int) -> Iterator[str]:
        """The names that one template of this rule stands for, layer by layer and expert by expert."""
        for layer in self.layers if self.layers is not None else [0]:
            numbered = template.replace("{layer}", str(layer)).replace("{2*layer}", str(2 * layer))
            before, expert, after = numbered.replace("{2*layer+1}", str(2 * layer + 1)).partition("{expert}")
            yield from (f"{before}{number}{after}" for number in range(experts)) if expert else (before,)


@dataclass(frozen=True)
class NamePrefix:
    """Where a block of rules stands.

    The prefix of its names on both sides, and its layers (None: one place, no `{layer}`).
    """

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
        """The rule between names of this place."""
        names = {self.hf + name: shape for name, shape in hf.items()}
        return ParamMapping(
            self.megatron + megatron, names, op or Copy(), self.layers, fp32, indices, upcast=upcast, kind=kind
        )

    def tensors(
        self, shapes: Mapping[str, Shape], *, fp32: bool = False, kind: str = "Linear"
    ) -> tuple[ParamMapping, ...]:
        """One rule a tensor of a model without Megatron names, for `unnamed`."""
        return tuple(self.rule("", {name: shape}, fp32=fp32, kind=kind) for name, shape in shapes.items())


def unnamed(rules: Iterable[ParamMapping]) -> tuple[ParamMapping, ...]:
    """The HF tensors of these rules under HF's names on both sides, for models that have no settled Megatron names.

    `mtp.` stands before those of multi-token prediction layers, as before all of Megatron's.
    """
    return tuple(
        replace(rule, megatron="mtp." * rule.megatron.startswith("mtp.") + name, hf={name: shape}, op=Copy())
        for rule in rules
        for name, shape in rule.hf.items()
    )


def decoder(dims: ModelDims, layers: Sequence[int]) -> NamePrefix:
    """These layers of the decoder."""
    return NamePrefix("decoder.layers.{layer}.", dims.root + "layers.{layer}.", layers)
