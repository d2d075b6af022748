"""Sorts the modules of a model by transformers' classes on the meta device.

Tests hold the families against this; at run time it is asked only about configs that a family does not convert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from converters.family import ModelFamily, Release
from quant.selection.meta_model import text_model, whole_model
from quant.selection.tree import ClassTree, is_gate


def meta_tree(family: ModelFamily, release: Release, config: Mapping[str, Any]) -> ClassTree:
    """Builds the model that an HF config describes without weights, and sorts its modules.

    Raises CkptkitError naming the key by which transformers cannot build it.
    """
    whole = whole_model(release, config)
    model = text_model(release, config) if whole is None else whole.get_submodule("language_model")
    modules = dict(model.named_modules())
    fused = {release.name(name): module for name, module in modules.items() if is_fused_experts(module)}
    blocks = {name.rpartition(".")[0] for name in fused}
    linears = {release.name(name) for name, module in modules.items() if isinstance(module, nn.Linear)}
    others = {
        release.name(name): type(module).__name__
        for name, module in modules.items()
        if not isinstance(module, nn.Linear)
        and isinstance(weight := getattr(module, "weight", None), torch.Tensor)
        and weight.ndim >= 2
    }
    experts = frozenset(name for prefix, module in fused.items() for name in _each(prefix, module, release.experts))
    outside = family.beside(config) if release.nested else ()
    spelled = {"lm_head", *(release.own_name(name) for name in linears)}
    return ClassTree(
        frozenset(linears | experts | {release.head}),
        release.head,
        frozenset(name for name in linears if is_gate(blocks, name, release.routers)),
        experts,
        others,
        release.drafts(release.text(config), release.root),
        outside,
        family.engine("sglang").dense,
        frozenset(spelled | (_linears_outside(outside, whole) if whole is not None else set())),
        release.kept,
        release.partly_fused,
        whole is not None or not outside,
    )


def _linears_outside(outside: tuple[str, ...], whole: nn.Module) -> set[str]:
    """Linear layers beside the language model, as transformers and, in some versions, the release spell them.

    Up to 4.57 transformers had the layers of Gemma's tower under `vision_model`, as the release has them.
    """
    found: set[str] = set()
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("language_model."):
            spellings = {name, re.sub(r"^vision_tower\.(?=encoder\.|head\.)", "vision_tower.vision_model.", name)}
            found |= {f"model.{one}" for one in spellings} | {one for one in spellings if one.startswith(outside)}
    return found


def is_fused_experts(module: nn.Module) -> bool:
    parameters = [getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj")]
    return sum(isinstance(parameter, torch.Tensor) and parameter.ndim == 3 for parameter in parameters) == 2


def _each(prefix: str, module: nn.Module, projections: tuple[str, ...]) -> Iterator[str]:
    for expert in range(module.get_parameter("down_proj").shape[0]):
        for projection in projections:
            yield f"{prefix}.{expert}.{projection}"
