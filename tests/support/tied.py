"""Releases of tied models that ship the output layer all the same, as Qwen3-0.6B and Qwen3-1.7B do."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from ckptkit.formats.hf.reader import INDEX
from support import models

# The test models that tie their embeddings, with the names of output layer and embedding in their releases.
_OF_TEXT = ("qwen2-tied", "qwen3-tied", "llama-tied", "glm4-tied", "mimo-tied-two-layers", "gemma3_text")
NAMES = {
    **dict.fromkeys((*_OF_TEXT, "qwen3_5_text-tied"), ("lm_head.weight", "model.embed_tokens.weight")),
    "gemma3": ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
    "qwen3_vl-tied": ("lm_head.weight", "model.language_model.embed_tokens.weight"),
}


def with_head(release, path, name, change=None):
    """A copy of a release whose first shard also holds the output layer: the embedding again, or `change`."""
    head, embedding = NAMES[name]
    shutil.copytree(release, path)
    add(path, head, models.tensors(path)[embedding].clone() if change is None else change)
    return path


def add(path, name, tensor):
    file = sorted(path.glob("*.safetensors"))[0]
    save_file(load_file(file) | {name: tensor}, file, metadata={"format": "pt"})
    if (path / INDEX).exists():
        index = json.loads((path / INDEX).read_text())
        index["weight_map"][name] = file.name
        index["metadata"]["total_size"] += tensor.nbytes
        (path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def one_bit_off(tensor):
    other = tensor.clone()
    other.view(torch.int16)[7, 5] ^= 1
    return other
