"""Which modules of a model are Linear layers: asked of transformers, because names alone cannot tell a Linear from a router."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from quant.selection.meta_model import text_model, whole_model
from quant.selection.released import Draft, Released, released
from quant.selection.sglang_classes import CLASSES, Dense


@dataclass(frozen=True)
class ClassTree:
    """Modules of a model by the names of its release, with one name an expert and projection.

    `linears`: every nn.Linear of the language model. Of these, `head` is the output embedding and `gates` stand directly beside
    the routed experts: they choose or weigh experts, and no INT4 reader packs either. `experts`: the projections of routed
    experts, with the module that holds them all (`….experts`). `others`: modules of another class whose `weight` has two or more
    axes, with that class. `drafts`: multi-token prediction layers, for which transformers has no classes. `outside`: beginnings
    of modules that are no part of the language model. `dense`: what SGLang's class cannot hold as INT4. `spelled`: every nn.Linear of
    the whole model, by all names that transformers has for it, in which lists may be written. `whole`: whether that is all that the
    checkpoint has, but for draft layers; where it is False, there are modules outside the language model whose names are not known.
    """

    linears: frozenset[str]
    head: str
    gates: frozenset[str]
    experts: Mapping[str, str]
    others: Mapping[str, str]
    drafts: tuple[Draft, ...] = ()
    outside: tuple[str, ...] = ()
    dense: tuple[Dense, ...] = ()
    spelled: frozenset[str] = frozenset()
    whole: bool = True

    @cached_property
    def packable(self) -> frozenset[str]:
        """Modules that may be INT4."""
        return frozenset(name for name in self.linears if self.reason_to_keep(name) is None)

    @cached_property
    def tails(self) -> frozenset[str]:
        """Names of Linear layers inside a decoder layer, with expert numbers left out."""
        return frozenset(tail(name) for name in self.linears - self.gates)

    @cached_property
    def last_tails(self) -> frozenset[str]:
        """As `tails`, and modules of other classes, of the last decoder layer alone."""
        layers = {name: int(match[1]) for name in [*self.linears, *self.others] if (match := _IN_LAYER.match(name))}
        last = max(layers.values(), default=0)
        return frozenset(tail(name) for name, layer in layers.items() if layer == last)

    def reason_to_keep(self, module: str) -> str | None:
        """Why this module is never INT4; None when it may be."""
        if module in self.others:
            return f"{self.others[module]} is no Linear"
        if module == self.head:
            return "output embedding"
        if module in self.gates:
            return "beside the experts: a router or a gate"
        if self.draft_of(module):
            return "draft layer"
        if module.startswith(self.outside or ("\0",)):
            return "outside the language model"
        if module not in self.linears:
            return "no module of the model"
        dense = self.dense_for(module)
        return dense.reason if dense else None

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


_IN_LAYER = re.compile(r".*?\blayers\.(\d+)\.")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+")


def tail(module: str) -> str:
    """A module's name inside its decoder layer, with its expert's number left out."""
    return _EXPERT_NUMBER.sub("#", _IN_LAYER.sub("", module, count=1))


def class_tree(config: Mapping[str, Any]) -> ClassTree:
    """Builds the model that an HF config describes on the meta device, without weights, and sorts its modules.

    Raises CkptkitError when the model is not known, or transformers refuses the config.
    """
    return _class_tree(json.dumps(dict(config), sort_keys=True))


@lru_cache(maxsize=4)  # several questions are asked of one model, and a large one takes a second to build
def _class_tree(text: str) -> ClassTree:
    config: Mapping[str, Any] = json.loads(text)
    names = released(config)
    whole = whole_model(names, config)
    model = text_model(names, config) if whole is None else whole.get_submodule("language_model")
    modules = dict(model.named_modules())
    experts = {names.name(name): module for name, module in modules.items() if _is_fused_experts(module)}
    blocks = {name.rpartition(".")[0] for name in experts}
    linears = {names.name(name) for name, module in modules.items() if isinstance(module, nn.Linear)}
    others = {
        names.name(name): type(module).__name__
        for name, module in modules.items()
        if not isinstance(module, nn.Linear)
        and isinstance(weight := getattr(module, "weight", None), torch.Tensor)
        and weight.ndim >= 2
    }
    gates = frozenset(name for name in linears if name.rpartition(".")[0] in blocks)
    routed = {
        name: prefix for prefix, module in experts.items() for name in _expert_linears(prefix, module, names.experts)
    }
    dense = CLASSES[str(config["model_type"])].dense
    everything = frozenset(linears | routed.keys() | {names.head})
    spelled = frozenset(
        {"lm_head"} | {f"{names.own_root}{name}" for name, module in modules.items() if isinstance(module, nn.Linear)}
    )
    beside = _linears_outside(names, whole) if whole is not None else set()
    known = whole is not None or not names.outside
    return ClassTree(
        everything,
        names.head,
        gates,
        routed,
        others,
        names.draft_layers(config),
        names.outside,
        dense,
        spelled | beside,
        known,
    )


def _linears_outside(names: Released, whole: nn.Module) -> set[str]:
    """Linear layers beside the language model, as transformers and, in some versions, the release spell them."""
    own = {
        name
        for name, module in whole.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("language_model.")
    }
    return {spelling for name in own for spelling in names.spellings_outside(name)}


def _is_fused_experts(module: nn.Module) -> bool:
    parameters = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(parameter, torch.Tensor) and parameter.ndim == 3 for parameter in parameters)


def _expert_linears(prefix: str, module: nn.Module, projections: tuple[str, ...]) -> Iterator[str]:
    for expert in range(module.get_parameter("down_proj").shape[0]):
        for projection in projections:
            yield f"{prefix}.{expert}.{projection}"
