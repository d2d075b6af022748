"""The modules of a model, sorted by the rules of its family, since names do not distinguish a Linear from a router."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ckptkit.converters.by_class import family_by_class
from ckptkit.converters.config.bounds import check_config
from ckptkit.converters.family import Draft, ModelFamily, Release
from ckptkit.converters.hf_names import layer_of, name_in_layer
from ckptkit.converters.registry import FAMILIES, family_of, find_family, refuse_draft
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.quant.engines.facts import Dense
from ckptkit.quant.engines.registry import engine_class

DRAFT_LAYER = "draft layer"
_OUTSIDE, _KEPT = "outside the language model", "no release quantizes it"
# Reasons for modules that ckptkit leaves unquantized although some readers load them quantized.
UNPACKED_BY_CHOICE = (DRAFT_LAYER, _OUTSIDE, _KEPT)


def is_gate(blocks: Collection[str], linear: str, routers: tuple[str, ...]) -> bool:
    """Whether a Linear chooses or weighs experts: a non-projection in a block of experts, or a name in `routers`."""
    block, _, name = linear.rpartition(".")
    return (block in blocks and not name.endswith("_proj")) or linear.endswith(routers or ("\0",))


@dataclass(frozen=True)
class ClassTree:
    """Modules of a model by the names of its release, with one name for each expert and projection."""

    linears: frozenset[str]  # every Linear layer of the language model, including the next three
    head: str  # the output embedding
    gates: frozenset[str]  # next to the experts, to choose or weigh them
    experts: frozenset[str]  # projections of routed experts
    others: Mapping[str, str]  # modules of other classes with a `weight` of two or more axes, with their class
    drafts: tuple[Draft, ...] = ()  # multi-token prediction layers, for which transformers has no classes
    outside: tuple[str, ...] = ()  # prefixes of modules outside the language model
    dense: tuple[Dense, ...] = ()  # layers that SGLang's class cannot hold as INT4
    linear_names: frozenset[str] = frozenset()  # every Linear of the complete model, by each name that lists may use
    kept_endings: tuple[str, ...] = ()  # endings of Linear layers that no release quantizes
    partly_fused: bool = False  # engines fuse queries, keys and values even if some of them are missing
    whole: bool = True  # all modules but those of draft layers are known, also outside the language model

    @cached_property
    def packable(self) -> frozenset[str]:
        """Modules that may be INT4."""
        return frozenset(name for name in self.linears if self.reason_to_keep(name) is None)

    @cached_property
    def tails(self) -> frozenset[str]:
        """Names of Linear layers inside a decoder layer, without expert numbers."""
        return frozenset(name_in_layer(name) for name in self.linears - self.gates)

    def tails_of(self, draft: Draft) -> frozenset[str]:
        """Like `tails`, with modules of other classes, of the decoder layer that a draft layer copies."""
        layers = {name: layer_of(name) or 0 for name in [*self.linears, *self.others] if layer_of(name) is not None}
        like = max(layers.values(), default=0) if draft.like is None else draft.like
        return frozenset(name_in_layer(name) for name, layer in layers.items() if layer == like)

    def reason_to_keep(self, module: str) -> str | None:
        """The reason why this module is never INT4, or None if it may be."""
        dense = self.dense_for(module)
        return self.reason_in_any_format(module) or (dense.reason if dense else None)

    def reason_in_any_format(self, module: str) -> str | None:
        """The reason why this module is not quantized to any format, or None if it may be."""
        if (class_name := self.others.get(module)) is not None:
            return f"{class_name} is not a Linear"
        if module == self.head:
            return "output embedding"
        if module in self.gates:
            return "router or gate of experts"
        if self.draft_of(module):
            return DRAFT_LAYER
        if module.startswith(self.outside or ("\0",)):
            return _OUTSIDE
        if self.is_kept(module):
            return _KEPT
        return None if module in self.linears else "not a module of the model"

    def is_kept(self, module: str) -> bool:
        """Whether no release quantizes a Linear layer."""
        return module.endswith(self.kept_endings or ("\0",))

    def is_router(self, module: str) -> bool:
        """Whether a module of a decoder layer chooses experts: a gate, or a module of a special class."""
        return module in self.gates or (module in self.others and layer_of(module) is not None)

    def dense_for(self, module: str) -> Dense | None:
        """The layers to which a module belongs that SGLang's class cannot hold as INT4, if any."""
        matching = (dense for dense in self.dense if re.fullmatch(dense.pattern, module))
        return None if module in self.experts else next(matching, None)

    def draft_of(self, module: str) -> Draft | None:
        """The draft layer that holds a module, if one does."""
        return next((draft for draft in self.drafts if module.startswith(draft.prefix)), None)


def class_tree(config: Mapping[str, Any]) -> ClassTree:
    """The modules of the model of an HF config, from the rules of its family.

    If the family does not convert the config (attention with biases, a missing key), transformers' classes are built,
    which takes seconds. Raises CkptkitError for an unknown model, or if transformers also refuses the config.
    """
    return _class_tree(json.dumps(dict(config), sort_keys=True))


@lru_cache(maxsize=4)  # there are several questions about one model
def _class_tree(text: str) -> ClassTree:
    config: Mapping[str, Any] = json.loads(text)
    check_config(config)
    release, family = release_of(config), family_of(config)
    try:
        return family_tree(family, release, config)
    except CkptkitError:
        asked = None if release.own_tree else family_by_class(config_for_class(release, config))
        if asked is None or asked.release is None:
            raise
        tree = family_tree(asked, asked.release, config)
        return replace(tree, drafts=release.drafts(release.text(config), release.root), kept_endings=release.kept)


def config_for_class(release: Release, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config from which transformers builds its class of a family's model, with transformers' `model_type`."""
    if config["model_type"] not in FAMILIES:
        return config
    model_type = config["model_type"] if release.nested or not release.model_type else release.model_type
    return {**config, "model_type": model_type, "architectures": None}


def release_of(config: Mapping[str, Any]) -> Release:
    """The release names of this config's `model_type`. Raises CkptkitError if INT4 is not supported for it."""
    family = find_family(config)
    if family is None or family.release is None:
        refuse_draft(config)
        known = ", ".join(sorted(name for name, one in FAMILIES.items() if one.release))
        raise CkptkitError(
            f"ckptkit does not know the Linear layers of model_type {shortened(config.get('model_type'))}",
            f"INT4 is supported for {known}",
            code="unsupported",
        )
    return family.release


def family_tree(family: ModelFamily, release: Release, config: Mapping[str, Any]) -> ClassTree:
    """The modules by the rules of the family. Raises CkptkitError as `ModelFamily.read_dims`."""
    linears, others = _modules(family, config)
    experts = frozenset(name for name in linears if ".experts." in name)
    blocks = {name.partition(".experts.")[0] for name in experts}
    outside, sglang = family.passthrough_prefixes(config) if release.nested else (), engine_class("sglang", config)
    known = not outside or (release.linears_outside is not None and isinstance(config.get("vision_config"), Mapping))
    beside = release.linears_outside(config) if outside and known and release.linears_outside else ()
    return ClassTree(
        frozenset(linears | {release.head}),
        release.head,
        frozenset(name for name in linears if is_gate(blocks, name, release.routers)),
        experts,
        dict(sorted(others.items(), key=lambda item: -1 if (layer := layer_of(item[0])) is None else layer)),
        release.drafts(release.text(config), release.root),
        outside,
        sglang.dense,
        frozenset({"lm_head", *map(release.own_name, linears - experts - {release.head}), *beside}),
        release.kept,
        sglang.partly_fused,
        known,
    )


def _modules(family: ModelFamily, config: Mapping[str, Any]) -> tuple[set[str], dict[str, str]]:
    """The Linear layers and the other modules of the language model, without multi-token prediction layers."""
    release, dims = family.release or Release(), family.read_dims(config)
    linears: set[str] = set()
    others: dict[str, str] = {}
    for rule in family.mappings(dims):
        if rule.megatron.startswith("mtp."):
            continue
        for name, shape in rule.hf.items():
            if len(shape) < 2 or not name.endswith(".weight"):
                continue
            for module in rule.names_of(name.removesuffix(".weight"), dims.experts):
                if rule.kind == "Linear" or (rule.kind == "Router" and module.endswith(release.routers or ("\0",))):
                    linears.add(module)
                else:
                    others[module] = release.classes.get(rule.kind, rule.kind)
    return linears, others
