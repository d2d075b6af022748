"""A HybridModel in torch_dist: layers under other numbers, no final norm, the layer pattern of another model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from support import models
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mutations.arguments import argument
from mutations.mutation import Damage, Mutation
from mutations.torch_dist_edits import lost, metadata

GLM = "glm4_moe/hybrid"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_EVEN = "{0,2,4,6,8,10,12,14,16,18,20,22}"
_PATTERN = "*-" * 3 + "*E" * 9 + "/*E"  # three dense layers where the model has two


def numbered(number: Callable[[int], int]) -> Damage:
    """Every decoder layer is stored under another number; what a finding names is a tensor that is then missing."""

    def other(key: str) -> str:
        match = _LAYER.fullmatch(key)
        return f"{match[1]}{number(int(match[2]))}{match[3]}" if match else key

    def change(content: Metadata) -> None:
        content.state_dict_metadata = {other(key): entry for key, entry in content.state_dict_metadata.items()}
        content.storage_data = {
            MetadataIndex(other(index.fqn), index.offset, index.index): place
            for index, place in content.storage_data.items()
        }

    def damage(path: Path, place: str) -> None:
        models.edit_metadata(path / "release", change)

    return damage


def _of(code: str, name: str, imitates: str, damage: Damage, place: str, mode: str) -> Mutation:
    return Mutation(name, imitates, (mode,), code, damage, {GLM: place})


MUTATIONS = (
    _of(
        "CK104",
        "layers of a HybridModel shifted by one",
        "a converter counted the embedding as a layer",
        numbered(lambda layer: layer + 1),
        f"decoder.layers.{_EVEN}.self_attention.linear_qkv.weight",
        "F21",
    ),
    _of(
        "CK104",
        "attention and MLP of a HybridModel exchanged",
        "a converter wrote the MLP of each layer first",
        numbered(lambda layer: layer ^ 1),
        f"decoder.layers.{_EVEN}.self_attention.linear_qkv.weight",
        "F21",
    ),
    _of(
        "CK104",
        "final norm of a HybridModel lost",
        "a rule knew GPTModel's name alone",
        metadata(lost),
        "decoder.final_norm.weight",
        "F1",
    ),
    _of(
        "CK701",
        "layer pattern of another model",
        "a launch script of a sibling",
        argument("hybrid_layer_pattern", _PATTERN),
        "hybrid_layer_pattern",
        "F5",
    ),
)
