"""Models of which the installed transformers has no class: parameters under published names, which compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

# Sizes of language models with latent attention.
LATENT: dict[str, Any] = {"vocab_size": 352, "hidden_size": 128, "num_hidden_layers": 12, "intermediate_size": 288}
LATENT |= {"num_attention_heads": 10, "num_key_value_heads": 10, "qk_nope_head_dim": 24, "v_head_dim": 20}
LATENT |= {"q_lora_rank": 48, "kv_lora_rank": 40, "moe_intermediate_size": 96}
LATENT |= {"max_position_embeddings": 256, "first_k_dense_replace": 2}
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
