"""Files of a Megatron torch_dist directory: tracker, metadata, common state, entries, chunks, keys, extra states."""

from __future__ import annotations

from typing import Any

from mutations.mutation import Damage, Mutation
from mutations.torch_dist_edits import (
    EMBEDDING,
    EXPERTS,
    FC1,
    FILE,
    TRACKER,
    added,
    arguments_gone,
    backend,
    beyond,
    bytes_damaged,
    expert_lost,
    extra_states_lost,
    fewer_experts,
    garbage,
    gone,
    hole,
    in_another_file,
    layer_lost,
    layout_said,
    lost,
    metadata,
    metadata_of,
    moved,
    not_moved,
    overlap,
    padded,
    reshaped,
    shorter,
    sized,
    stacked,
    stray,
    tracker,
)

QWEN, QWEN3, GLM, DEEPSEEK = "qwen2/megatron", "qwen3_moe/megatron", "glm4_moe/megatron", "deepseek_v3/megatron"
ROOT = {QWEN: TRACKER, GLM: TRACKER}
DATA = {QWEN: FILE, GLM: FILE}
WEIGHT = {QWEN: FC1, DEEPSEEK: "decoder.layers.1.mlp.linear_fc1.weight"}


def _of(code: str, name: str, imitates: str, damage: Damage, on: dict[str, str], modes: tuple[str, ...], *references: str, **more: Any) -> Mutation:
    return Mutation(name, imitates, modes, "headers", code, damage, on, references, **more)


MUTATIONS = (
    # The directory
    _of("CK111", "tracker of an iteration that is not there", "an old iteration was deleted", tracker("400"), ROOT, ("F10",), "ms-swift#8151"),
    _of("CK111", "tracker empty", "a file system out of space", tracker(""), ROOT, ("F10",), "Megatron-Bridge#829"),
    _of("CK111", "tracker that is no number", "a tracker written by hand", tracker("iter_0000001"), ROOT, ("F10",)),
    _of("CK111", "release never moved into place", "a converter wrote the tracker before it moved the directory", not_moved, ROOT, ("F10",), "slime#306"),
    _of("CK111", ".metadata missing", "hidden files were not copied", gone, {QWEN: ".metadata", GLM: ".metadata"}, ("F2", "F10")),
    _of("CK111", "metadata.json missing", "only weights were copied", gone, {QWEN: "metadata.json", DEEPSEEK: "metadata.json"}, ("F10",)),
    _of("CK111", "common.pt missing", "only weights were copied", gone, {QWEN: "common.pt", QWEN3: "common.pt"}, ("F10",), "Megatron-Bridge#1514"),
    _of("CK111", ".metadata of garbage", "a download stopped", garbage, {QWEN: ".metadata"}, ("F2",)),
    _of("CK111", "common.pt of garbage", "a download stopped", garbage, {QWEN: "common.pt"}, ("F2",)),
    _of("CK111", "another backend", "a save in zarr", backend(sharded_backend="zarr"), {QWEN: "metadata.json"}, ("F10",)),
    _of("CK111", "arguments that are a text", "common.pt of another tool", arguments_gone, {QWEN: "release"}, ("F5",)),
    # Entries
    _of("CK112", "data file missing", "one rank's file was not copied", gone, DATA, ("F2",)),
    _of("CK112", "data file cut short", "a copy stopped", sized(lambda size: size * 2 // 3), DATA, ("F2",), "vmlx-swift#217"),
    _of("CK112", "data file empty", "a file system out of space", sized(lambda size: 0), DATA, ("F2",)),
    _of("CK112", "data file of an earlier save", "a save with fewer ranks was there before", stray, {QWEN: "__7_0.distcp"}, ("F22",), severity="warning"),
    _of("CK112", "entry beyond its file", ".metadata is of another save", metadata(beyond), WEIGHT, ("F2",)),
    _of("CK112", "entry in a file that is not there", ".metadata is of a save with more ranks", metadata(in_another_file), WEIGHT, ("F2",), "NeMo-RL#1053"),
    _of("CK112", "entry inside another", "offsets of another save", metadata(moved(-10)), WEIGHT, ("F2",)),
    _of("CK117", "entry too short for its tensor", "another dtype was stored than .metadata says", metadata(shorter), WEIGHT, ("F2",)),
    _of("CK117", "bytes behind the last entry", "a shorter save over a longer one", sized(lambda size: size + 4096), DATA, ("F2", "F22"), severity="warning"),
    # Chunks
    _of("CK113", "rows in no chunk", "one tensor parallel rank never saved", metadata(hole), WEIGHT, ("F2", "F4")),
    _of("CK113", "rows in two chunks", "a replica was saved twice", metadata(overlap), WEIGHT, ("F22",)),
    _of("CK113", "expert in no chunk", "one expert parallel rank never saved", metadata(expert_lost), dict.fromkeys((QWEN3, GLM, DEEPSEEK), EXPERTS), ("F8",)),
    # Keys
    _of(
        "CK104",
        "key lost",
        "a rule was missing",
        metadata(lost),
        {
            QWEN: "decoder.layers.3.mlp.linear_fc2.weight",
            GLM: "decoder.layers.3.mlp.router.expert_bias",
            DEEPSEEK: "decoder.layers.4.self_attention.linear_kv_down_proj.weight",
        },
        ("F1", "F20"),
        "Megatron-Bridge#6032",
    ),
    _of(
        "CK104",
        "key that no rule knows",
        "a module of a fork",
        metadata(added),
        {QWEN: "decoder.layers.3.post_self_attn_layernorm.weight"},
        ("F20", "F27"),
        "slime#1780",
        "pytorch#148252",
    ),
    _of("CK104", "stored layer lost", "a pipeline stage saved one layer less", layer_lost, {QWEN: "decoder.layers.11."}, ("F5", "F21"), "slime#309"),
    _of(
        "CK114",
        "stored MTP layer lost",
        "the last stage did not save it",
        layer_lost,
        {GLM: "mtp.layers.0.", DEEPSEEK: "mtp.layers.0."},
        ("F6",),
        "Megatron-Bridge#4960",
    ),
    _of(
        "CK104",
        "stored output layer lost",
        "the last stage was taken for a tied one",
        metadata(lost),
        {GLM: "output_layer.weight", QWEN3: "output_layer.weight"},
        ("F19",),
    ),
    _of(
        "CK104",
        "an expert fewer",
        "the last expert is missing in a layer",
        metadata_of(fewer_experts, "decoder.layers.5.mlp.experts.experts.11.linear_fc2.weight"),
        {QWEN3: EXPERTS},
        ("F8",),
    ),
    _of("CK105", "stored weight turned", "rows taken for columns", metadata(reshaped), WEIGHT, ("F7",)),
    _of(
        "CK115",
        "content_metadata says stacked layers",
        "common.pt of another save",
        layout_said(non_homogeneous_layers=False),
        {QWEN: "decoder.layers."},
        ("F20",),
    ),
    _of(
        "CK115",
        "content_metadata says experts apart",
        "common.pt of another save",
        layout_said(singleton_local_shards=True),
        {GLM: "experts", QWEN: "linear_fc1"},
        ("F20",),
    ),
    _of(
        "CK115",
        "one layer stacked, the others not",
        "two saves were mixed",
        metadata_of(stacked, "decoder.layers.mlp.linear_fc1.weight"),
        {QWEN: FC1},
        ("F20",),
    ),
    _of(
        "CK116",
        "extra states lost",
        "a writer that knows only tensors",
        extra_states_lost,
        {QWEN: "_extra_state", GLM: "_extra_state"},
        ("F20",),
        "Megatron-LM#900",
        "Megatron-LM#1602",
        "Megatron-Bridge#1210",
    ),
    _of(
        "CK116",
        "one extra state lost",
        "one expert's object is missing",
        metadata_of(lost, "decoder.layers.5.mlp.experts.experts.linear_fc1._extra_state"),
        {QWEN3: "decoder.layers.5.mlp.experts.experts.linear_fc1._extra_state/shard_3_12"},
        ("F20",),
        "NeMo-RL#1053",
    ),
    # Bytes
    Mutation("stored bytes damaged", "a block of a disk reads as zeros", ("F2",), "values", "CK201", bytes_damaged, WEIGHT, ("vmlx-swift#217",)),
    Mutation(
        "padding rows that are not zero",
        "rows beyond the vocabulary were trained or never written",
        ("F23",),
        "values",
        "CK209",
        padded(lambda rows: rows),
        {QWEN: EMBEDDING, GLM: EMBEDDING},
    ),
)
