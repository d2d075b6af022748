"""Sorts the modules of a model by the rules of its family: names alone cannot tell a Linear from a router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.config.bounds import check_config
from converters.family import ModelFamily, Release
from converters.hf_names import layer_of
from converters.registry import FAMILIES, refuse_draft
from quant.selection.tree import ClassTree, is_gate


def class_tree(config: Mapping[str, Any]) -> ClassTree:
    """The modules of the model that an HF config describes, from the rules of its family.

    A config that the family does not convert (attention with biases, a key left out) is asked of transformers' own
    classes, where these have the same modules. That takes seconds. Raises CkptkitError when the model is not known, or
    transformers refuses the config too.
    """
    return _class_tree(json.dumps(dict(config), sort_keys=True))


@lru_cache(maxsize=4)  # several questions are asked of one model
def _class_tree(text: str) -> ClassTree:
    config: Mapping[str, Any] = json.loads(text)
    check_config(config)
    release, family = release_of(config), FAMILIES[config["model_type"]]
    try:
        return family_tree(family, release, config)
    except CkptkitError:
        if release.own_tree:
            raise
        tree: ClassTree = import_module("quant.selection.meta_tree").meta_tree(family, release, config)
        return tree


def release_of(config: Mapping[str, Any]) -> Release:
    """How releases of this config's `model_type` are spelled.

    Raises CkptkitError where INT4 is not supported for it.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or family.release is None:
        refuse_draft(config)
        known = ", ".join(sorted(name for name, one in FAMILIES.items() if one.release))
        raise CkptkitError(
            f"model_type {shortened(model_type)}: which of its tensors are Linear layers is not known",
            f"INT4 is supported for {known}",
            code="unsupported",
        )
    return family.release


def family_tree(family: ModelFamily, release: Release, config: Mapping[str, Any]) -> ClassTree:
    """The modules as the rules of the family have them. Raises CkptkitError as `ModelFamily.read_dims`."""
    linears, others = _modules(family, config)
    experts = frozenset(name for name in linears if ".experts." in name)
    blocks = {name.partition(".experts.")[0] for name in experts}
    outside = family.beside(config) if release.nested else ()
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
        family.engine("sglang").dense,
        frozenset({"lm_head", *map(release.own_name, linears - experts - {release.head}), *beside}),
        release.kept,
        release.partly_fused,
        known,
    )


def _modules(family: ModelFamily, config: Mapping[str, Any]) -> tuple[set[str], dict[str, str]]:
    """The Linear layers of the language model, and its modules of other classes.

    Without multi-token prediction layers.
    """
    release, dims = family.release or Release(), family.read_dims(config)
    linears: set[str] = set()
    others: dict[str, str] = {}
    for rule in family.mappings(dims):
        if rule.megatron.startswith("mtp."):
            continue
        for name, shape in rule.hf.items():
            if len(shape) < 2 or not name.endswith(".weight"):
                continue
            modules = rule.names_of(name.removesuffix(".weight"), dims.experts)
            if rule.kind == "Linear" or (rule.kind == "Router" and release.routers):
                linears.update(modules)
            else:
                others |= dict.fromkeys(modules, release.classes.get(rule.kind, rule.kind))
    return linears, others
