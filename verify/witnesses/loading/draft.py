"""The draft model that an engine makes of multi-token prediction layers for speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ckptkit.converters.planner import dims_of
from ckptkit.verify.evidence.folding import LAYER
from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.loading.names import draft_prefixes


def without_shared(tensors: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A draft model's own tensors, without those that are its target's."""
    shared = {tensor.data_ptr() for tensor in target.values()}
    return {name: tensor for name, tensor in tensors.items() if tensor.data_ptr() not in shared}


def draft_build(build: ModelBuild) -> ModelBuild:
    """The draft model of a model: it may look at `beyond_layers`, and must hold multi-token prediction layers."""
    prefixes = draft_prefixes(build.config)
    weights = partial(build.weights, beyond_layers(build.config)) if build.weights else None
    reference = partial(build.reference, lambda name: name.startswith(prefixes))
    return replace(build, draft=True, weights=weights, reference=reference)


def beyond_layers(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Tells by its name whether a draft model may look at a tensor: any but those of the target's decoder layers."""
    prefixes, layers = draft_prefixes(config), dims_of(config).layers

    def may_look(name: str) -> bool:
        layer = LAYER.match(name)
        return name.startswith(prefixes) or layer is None or int(layer[1]) >= layers

    return may_look
