"""Small models with random seeded weights, made by transformers: the independent truth that tests compare with."""

import pickle
from pathlib import Path

import torch
from families import ALL_CASES, HF_CASES, case
from safetensors.torch import load_file, save_file

from ckptkit.core.specs import TensorSpec

NAMES = ("qwen2-tied", "qwen2-untied", "qwen3_moe", "glm4_moe")

# How names begin of what an engine's class of a model leaves aside, and no draft class of `DRAFTS` takes.
UNREAD = {"exaone_moe": ("mtp.",), "qwen3_omni_moe": ("talker.", "code2wav.")}


def configs():
    return {name: HF_CASES[name].config() for name in NAMES}


def save(name, path, dtype=torch.bfloat16, *, fused=False, shard_size="400KB"):
    """Builds the model and saves it as its release would look: several shards, one tensor an expert unless `fused`."""
    model, _ = case.save(name, ALL_CASES[name], path, dtype, fused=fused, shard_size=shard_size)
    return model


def tensors(path):
    return {key: value for file in sorted(path.glob("*.safetensors")) for key, value in load_file(file).items()}


def unequal(found, wanted, apart_from=()):
    """Names that only one of two HF directories, or of two mappings, has, or that differ in dtype, shape or a bit."""
    ours, theirs = (
        {
            name: (tensor.dtype, tensor.shape, tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
            for name, tensor in (tensors(one) if isinstance(one, Path) else one).items()
        }
        for one in (found, wanted)
    )
    return sorted({name for name, _ in ours.items() ^ theirs.items()}.difference(apart_from))


def edit(path, name, tensor):
    """Replaces (or, with None, removes) one tensor in whichever shard holds it, leaving the index as it was."""
    for file in sorted(path.glob("*.safetensors")):
        content = load_file(file)
        if name in content:
            del content[name]
            save_file(content | ({name: tensor} if tensor is not None else {}), file, metadata={"format": "pt"})
            return
    raise KeyError(name)


def edit_metadata(path, change):
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with (path / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


class InMemory:
    def __init__(self, config, tensors):
        self.config = dict(config)
        self.tensors = dict(tensors)
        self.specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
        self.groups = [(name,) for name in tensors]

    def read(self, names):
        return {name: self.tensors[name] for name in names}


def content(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
