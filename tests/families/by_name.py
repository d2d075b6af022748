"""Models of which the installed transformers has no class: parameters under published names, which compute nothing."""

import tomllib
from copy import deepcopy
from pathlib import Path

import torch
from releases.record import unfolded
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

# Sizes of language models with latent attention.
LATENT = {"vocab_size": 352, "hidden_size": 128, "num_hidden_layers": 12, "intermediate_size": 288}
LATENT |= {"num_attention_heads": 10, "num_key_value_heads": 10, "qk_nope_head_dim": 24, "v_head_dim": 20}
LATENT |= {"q_lora_rank": 48, "kv_lora_rank": 40, "moe_intermediate_size": 96}
LATENT |= {"max_position_embeddings": 256, "first_k_dense_replace": 2}
PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text())
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def published(model):
    for kind, patterns in PUBLISHED[model].items():
        dtype, shape = kind.split()
        for name in (name for pattern in patterns for name in unfolded(pattern)):
            yield name, tuple(map(int, shape.split("x"))), DTYPES[dtype]


def tower(model):
    """Random tensors of a vision tower, which is only carried along."""
    return lambda _, dtype: {name: torch.randn(shape).to(dtype) for name, shape, _ in published(f"{model}_vision")}


def multimodal(kind, architecture, text, vision):
    """A config of one of the classes below."""
    content = {"text_config": deepcopy(text), "vision_config": dict(vision), "dtype": "bfloat16"}
    return kind(architectures=[architecture], tie_word_embeddings=False, **content)


def classes(model_type, architecture, *, also=""):
    """A class of configs, and one of models with the published parameters, with the model's dtype in place of BF16.

    `also`: those that a model has whose config has `vision`.
    """
    config_class = type(f"{model_type}_config", (PretrainedConfig,), {"model_type": model_type})

    def build(self, config, dtype):
        PreTrainedModel.__init__(self, config)
        more = published(also) if also and config.vision else ()
        for name, shape, stored in (*published(model_type), *more):
            *path, leaf = name.split(".")
            place = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_parameter(
                leaf, nn.Parameter(torch.empty(shape, dtype=dtype if stored == torch.bfloat16 else stored))
            )

    members = {"config_class": config_class, "__init__": build}
    model_class = type(architecture, (PreTrainedModel,), members)
    model_class.from_config = staticmethod(lambda config, dtype: model_class(config, dtype))
    return config_class, model_class
