"""The modules of a model, sorted by whether they may be quantized."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from converters.family import Dense, Draft
from converters.hf_names import layer_of, tail

DRAFT_LAYER = "draft layer"
_OUTSIDE, _KEPT = "outside the language model", "no release quantizes it"
# Why ckptkit leaves a module unquantized that some readers load quantized: theirs to judge, each by its own names.
UNPACKED_BY_CHOICE = (DRAFT_LAYER, _OUTSIDE, _KEPT)


def is_gate(blocks: Collection[str], linear: str, routers: tuple[str, ...]) -> bool:
    """Whether a Linear chooses or weighs experts: in one of their blocks, unless it makes their inputs, or by its name.

    `routers`: as in `Release`.
    """
    block, _, name = linear.rpartition(".")
    return (block in blocks and not name.endswith("_proj")) or linear.endswith(routers or ("\0",))


@dataclass(frozen=True)
class ClassTree:
    """Modules of a model by the names of its release, with one name an expert and projection.

    No INT4 reader packs head or gates.
    """

    linears: frozenset[str]  # every Linear layer of the language model, the next three included
    head: str  # the output embedding
    gates: frozenset[str]  # directly beside the experts, to choose or weigh them
    experts: frozenset[str]  # projections of routed experts
    others: Mapping[str, str]  # modules of another class whose `weight` has two or more axes, with that class
    drafts: tuple[Draft, ...] = ()  # multi-token prediction layers, for which transformers has no classes
    outside: tuple[str, ...] = ()  # prefixes of modules outside the language model
    dense: tuple[Dense, ...] = ()  # what SGLang's class cannot hold as INT4
    spelled: frozenset[str] = frozenset()  # every Linear of the whole model, by each name that lists may use
    kept: tuple[str, ...] = ()  # endings of Linear layers that no release quantizes
    partly_fused: bool = False  # engines fuse queries, keys and values also where some of them are not there
    whole: bool = True  # all modules but those of draft layers are known, also outside the language model

    @cached_property
    def packable(self) -> frozenset[str]:
        """Modules that may be INT4."""
        return frozenset(name for name in self.linears if self.reason_to_keep(name) is None)

    @cached_property
    def tails(self) -> frozenset[str]:
        """Names of Linear layers inside a decoder layer, with expert numbers left out."""
        return frozenset(tail(name) for name in self.linears - self.gates)

    def tails_of(self, draft: Draft) -> frozenset[str]:
        """As `tails`, and modules of other classes, of the one decoder layer that a draft layer is like."""
        layers = {name: layer_of(name) or 0 for name in [*self.linears, *self.others] if layer_of(name) is not None}
        like = max(layers.values(), default=0) if draft.like is None else draft.like
        return frozenset(tail(name) for name, layer in layers.items() if layer == like)

    def reason_to_keep(self, module: str) -> str | None:
        """Why this module is never INT4; None when it may be."""
        dense = self.dense_for(module)
        return self.reason_in_any_format(module) or (dense.reason if dense else None)

    def reason_in_any_format(self, module: str) -> str | None:
        """Why this module is not quantized to any format; None when it may be."""
        if module in self.others:
            return f"{self.others[module]} is not a Linear"
        if module == self.head:
            return "output embedding"
        if module in self.gates:
            return "beside the experts: a router or a gate"
        if self.draft_of(module):
            return DRAFT_LAYER
        if module.startswith(self.outside or ("\0",)):
            return _OUTSIDE
        if self.is_kept(module):
            return _KEPT
        return None if module in self.linears else "not a module of the model"

    def is_kept(self, module: str) -> bool:
        """Whether a Linear layer stays as it is in every release."""
        return module.endswith(self.kept or ("\0",))

    def is_router(self, module: str) -> bool:
        """Whether a module of a decoder layer chooses experts: a gate, or of a class of its own in the layer."""
        return module in self.gates or (module in self.others and layer_of(module) is not None)

    def dense_for(self, module: str) -> Dense | None:
        """Why SGLang's class cannot hold a module as INT4, if it cannot."""
        return (
            None
            if module in self.experts
            else next((dense for dense in self.dense if re.fullmatch(dense.pattern, module)), None)
        )

    def draft_of(self, module: str) -> Draft | None:
        """The draft layer that holds a module, if one does."""
        return next((draft for draft in self.drafts if module.startswith(draft.prefix)), None)
