"""What one rank of a training run leaves wrong in a Megatron checkpoint: its layers, experts, slice, names, files."""

import pickle

import torch
from support import models
from torch.distributed.checkpoint.metadata import MetadataIndex

from mutations.edits import edit_stored
from mutations.torch_dist import index_of, stored_at

ROUTED, FUSED = "decoder.layers.4.pre_mlp_layernorm.weight", "decoder.layers.4.mlp.linear_fc1.layer_norm_weight"
BIAS = "decoder.layers.6.mlp.router.expert_bias"


def keys_of(path, prefix):
    with (path / "release" / ".metadata").open("rb") as stream:
        content = pickle.load(stream)
    return [key for key in content.state_dict_metadata if key.startswith(prefix) and "_extra_state" not in key]


def layers_of(origin):
    def damage(path, place):
        def change(content):
            before = dict(content.storage_data)
            for index in [index for index in before if index.fqn.startswith("decoder.layers.")]:
                _, _, layer, rest = index.fqn.split(".", 3)
                there = f"decoder.layers.{origin(int(layer))}.{rest}"
                content.storage_data[index] = before[MetadataIndex(there, index.offset)]

        models.edit_metadata(path / "release", change)

    return damage


CHANGES = {"stages_swapped": lambda layer: (layer + 6) % 12}


def stage_rotated(layer):
    """The second of two stages of six layers, each with the values of the next."""
    return layer if layer < 6 else 6 + (layer - 5) % 6


def local_experts(path, place, prefix="decoder.layers."):
    """The second of two expert parallel ranks saved its experts under its local numbers: 6 to 11 are 0 to 5."""

    def change(content):
        for key in keys_of(path, prefix):
            for chunk in content.state_dict_metadata[key].chunks if ".experts.experts." in key else ():
                if chunk.offsets[0] >= 6:
                    here = MetadataIndex(key, chunk.offsets)
                    there = MetadataIndex(key, torch.Size([chunk.offsets[0] - 6, *chunk.offsets[1:]]))
                    content.storage_data[here] = content.storage_data[there]

    models.edit_metadata(path / "release", change)


def second_slice_swapped(before):
    """Gate and up exchanged in the slice of the second of two tensor parallel ranks."""
    gate, up = before.chunk(2)
    half = len(gate) // 2
    return torch.cat([gate[:half], up[half:], up[:half], gate[half:]])


def stored_nowhere(content, key):
    del content.storage_data[index_of(content, key)]


def other_alias(path, key):
    """The other name of a norm has bytes of its own: those of the layer after it."""

    def change(content):
        later = key.replace("layers.4.", "layers.5.")
        content.storage_data[index_of(content, key)] = stored_at(content, later)

    models.edit_metadata(path / "release", change)


def both_of_another_layer(path, key):
    for name in (ROUTED, FUSED):
        other_alias(path, name)
    return "model.layers.4.post_attention_layernorm.weight"


def rounded(path, key):
    edit_stored(path, key, lambda before: before.bfloat16().float())
