"""Models of which the installed transformers has no class: parameters under published names, which compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

BF16, F32 = torch.bfloat16, torch.float32
# By name, shape and dtype.
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
Published = Iterable[tuple[str, tuple[int, ...], torch.dtype]]


def classes(model_type: str, architecture: str, published: Callable[[Any], Published]) -> tuple[Any, Any]:
    """A class of configs, and one of models with these parameters of a config, with its own dtype in place of BF16."""
    config_class = type(f"{model_type}_config", (PretrainedConfig,), {"model_type": model_type})

    def build(self: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype) -> None:
        PreTrainedModel.__init__(self, config)
        for name, shape, stored in published(config):
            *path, leaf = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=dtype if stored == BF16 else stored)))

    members: dict[str, Any] = {"config_class": config_class, "__init__": build}
    model_class: Any = type(architecture, (PreTrainedModel,), members)
    model_class.from_config = staticmethod(lambda config, dtype: model_class(config, dtype))
    return config_class, model_class
