"""Small models with random seeded weights, made by transformers: the independent truth that tests compare with."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from ckptkit.specs import TensorSpec

# 12 layers and 12 experts (not a power of two, two digits). Matrices of different kinds differ in shape, also with gate
# above up, with q, k and v in one and with the vocabulary padded for 1 or 2 ranks: a swap of two kinds never fits.
_SIZES: dict[str, Any] = {
    "vocab_size": 352,
    "hidden_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 288,
    "max_position_embeddings": 256,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 96, "num_experts_per_tok": 3}


def configs() -> dict[str, PretrainedConfig]:
    """One config a name; every supported family, tied and untied."""
    return {
        "qwen2-tied": Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "qwen2-untied": Qwen2Config(**_SIZES, tie_word_embeddings=False),
        "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_MOE, num_experts=12, norm_topk_prob=True),
        "glm4_moe": Glm4MoeConfig(
            **_SIZES,
            **_MOE,
            n_routed_experts=12,
            n_shared_experts=1,
            first_k_dense_replace=2,
            use_qk_norm=True,
            attention_bias=True,
            routed_scaling_factor=2.5,
        ),
    }


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The model, every parameter random (norms and biases too), the router bias fp32 around a large offset."""
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(configs()[name], dtype=dtype)
    for key, parameter in model.named_parameters():
        spread = 0.02 if "norm" not in key else 0.2
        parameter.data = (torch.randn(parameter.shape) * spread + ("norm" in key)).to(dtype)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(6.9 + 0.1 * torch.randn(buffer.shape))
    return model.eval()


def save(name: str, path: Path, dtype: torch.dtype = torch.bfloat16, *, fused: bool = False, shard_size: str = "400KB") -> PreTrainedModel:
    """Builds the model and saves it as its release would look: several shards, one tensor an expert unless `fused`."""
    model = build(name, dtype)
    model.save_pretrained(path, max_shard_size=shard_size, save_original_format=not fused)
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    return model


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of an HF directory, by the safetensors library alone."""
    return {key: value for file in sorted(path.glob("*.safetensors")) for key, value in load_file(file).items()}


def edit(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces (or, with None, removes) one tensor in whichever shard holds it, leaving the index as it was."""
    for file in sorted(path.glob("*.safetensors")):
        content = load_file(file)
        if name in content:
            del content[name]
            save_file(content | ({name: tensor} if tensor is not None else {}), file, metadata={"format": "pt"})
            return
    raise KeyError(name)


def edit_metadata(path: Path, change: Callable[[Metadata], None]) -> None:
    """Rewrites the `.metadata` of a torch_dist directory after `change`."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with (path / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


class InMemory:
    """A ckptkit Checkpoint made of tensors at hand."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = dict(config)
        self.tensors = dict(tensors)
        self.specs = {name: TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.groups = [(name,) for name in tensors]

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """These tensors."""
        return {name: self.tensors[name] for name in names}
