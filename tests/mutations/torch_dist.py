"""Files of a Megatron torch_dist directory: tracker, metadata, common state, entries, chunks, keys, extra states."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support import models
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from ckptkit.core.dtypes import dtype_name
from ckptkit.formats.torch_save.blob import Blob
from mutations.edits import edit_common, edit_json, saved
from mutations.mutation import Damage, Mutation, at

QWEN, QWEN3, GLM, DEEPSEEK = "qwen2/megatron", "qwen3_moe/megatron", "glm4_moe/megatron", "deepseek_v3/megatron"
TRACKER, FILE = "latest_checkpointed_iteration.txt", "__0_0.distcp"
FC1 = "decoder.layers.3.mlp.linear_fc1.weight"
EXPERTS = "decoder.layers.5.mlp.experts.experts.linear_fc2.weight"
EMBEDDING = "embedding.word_embeddings.weight"
ROOT, DATA = at(TRACKER, QWEN, GLM), at(FILE, QWEN, GLM)
WEIGHT = {QWEN: FC1, DEEPSEEK: "decoder.layers.1.mlp.linear_fc1.weight"}


def tracker(text: str) -> Damage:
    """The tracker says something else."""
    return lambda path, file: (path / file).write_text(text)


def gone(path: Path, file: str) -> str:
    """A file of the iteration is not there; findings name it, or the directory that lacks it."""
    (path / "release" / file).unlink()
    return file


def garbage(path: Path, file: str) -> str:
    (path / "release" / file).write_bytes(b"garbage")
    return "release"


def not_moved(path: Path, file: str) -> None:
    """A converter died after it wrote the tracker and before it moved iter_0000001."""
    (path / "release").rename(path / "iter_0000001")


def backend(**values: Any) -> Damage:
    """metadata.json says something else."""
    return lambda path, file: edit_json(path / "release" / file, lambda content: content.update(values))


def sized(change: Callable[[int], int]) -> Damage:
    """The file with the data is shorter or longer."""

    def damage(path: Path, file: str) -> None:
        found = path / "release" / file
        os.truncate(found, change(found.stat().st_size))

    return damage


def stray(path: Path, file: str) -> None:
    (path / "release" / file).write_bytes(b"of an earlier save")


def metadata(change: Callable[[Metadata, str], object], named: str | None = None) -> Damage:
    """`.metadata` says something else of a key; `named` is what a finding names in place of the key."""

    def damage(path: Path, key: str) -> str | None:
        models.edit_metadata(path / "release", lambda content: change(content, key))  # type: ignore[arg-type]
        return named

    return damage


def index_of(content: Metadata, key: str, part: int = 0) -> MetadataIndex:
    return next(index for index in content.storage_data if (index.fqn, index.index) == (key, part))


def lost(content: Metadata, key: str) -> None:
    """Neither the key nor where it lies."""
    del content.state_dict_metadata[key]
    for index in [index for index in content.storage_data if index.fqn == key]:
        del content.storage_data[index]


def added(content: Metadata, key: str) -> None:
    """A key that no rule knows, with the bytes of another."""
    content.state_dict_metadata[key] = content.state_dict_metadata[FC1]
    content.storage_data[MetadataIndex(key, torch.Size([0, 0]), 0)] = content.storage_data[index_of(content, FC1)]


def moved(by: int) -> Callable[[Metadata, str], None]:
    """An entry that begins some bytes off."""

    def change(content: Metadata, key: str) -> None:
        content.storage_data[index_of(content, key)].offset += by

    return change


def beyond(content: Metadata, key: str) -> None:
    content.storage_data[index_of(content, key)].offset += 1 << 30


def in_another_file(content: Metadata, key: str) -> None:
    content.storage_data[index_of(content, key)].relative_path = "__3_0.distcp"


def shorter(content: Metadata, key: str) -> None:
    """An entry that is said to be shorter than its tensor."""
    content.storage_data[index_of(content, key)].length //= 2


def hole(content: Metadata, key: str) -> None:
    """Only the first rows are in a chunk."""
    old = index_of(content, key)
    first = content.state_dict_metadata[key].chunks[0]
    content.state_dict_metadata[key].chunks = [
        ChunkStorageMetadata(first.offsets, torch.Size([first.sizes[0] - 8, *first.sizes[1:]]))
    ]
    assert old.offset == first.offsets


def overlap(content: Metadata, key: str) -> None:
    """The same rows in two chunks."""
    chunks = content.state_dict_metadata[key].chunks
    chunks.append(chunks[0])
    content.storage_data[MetadataIndex(key, chunks[0].offsets, len(chunks) - 1)] = content.storage_data[
        index_of(content, key)
    ]


def expert_lost(content: Metadata, key: str) -> None:
    """One rank's expert never arrived."""
    content.state_dict_metadata[key].chunks.pop(5)


def fewer_experts(content: Metadata, key: str) -> None:
    """The tensor is one expert shorter, and its chunks agree."""
    entry = content.state_dict_metadata[key]
    entry.chunks.pop()
    entry.size = torch.Size([entry.size[0] - 1, *entry.size[1:]])


def reshaped(content: Metadata, key: str) -> None:
    """A tensor of the same bytes in another shape."""
    entry = content.state_dict_metadata[key]
    rows, columns = entry.size
    entry.size = torch.Size([columns, rows])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), entry.size)]


def stacked(content: Metadata, key: str) -> None:
    """The key of another layout: without the number of its layer."""
    content.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"] = content.state_dict_metadata.pop(key)
    old = index_of(content, key)
    content.storage_data[MetadataIndex("decoder.layers.mlp.linear_fc1.weight", old.offset, 0)] = (
        content.storage_data.pop(old)
    )


def layer_lost(path: Path, prefix: str) -> str:
    """Nothing of a layer."""

    def change(content: Metadata) -> None:
        for key in [key for key in content.state_dict_metadata if key.startswith(prefix)]:
            lost(content, key)

    models.edit_metadata(path / "release", change)
    # Of a whole multi-token prediction layer it is the training arguments that say that it should be there.
    return prefix + "mlp.linear_fc1.weight" if prefix.startswith("decoder") else prefix + "*"


def extra_states_lost(path: Path, place: str) -> None:
    """All `_extra_state` objects, as a writer leaves them out that knows only tensors."""

    def change(content: Metadata) -> None:
        for key in [key for key in content.state_dict_metadata if "_extra_state" in key]:
            lost(content, key)

    models.edit_metadata(path / "release", change)


def layout_said(**values: Any) -> Damage:
    """content_metadata of common.pt says another layout of keys."""
    return lambda path, place: edit_common(path, lambda common: common["content_metadata"].update(values))


def arguments_gone(path: Path, place: str) -> None:
    """The arguments are a text, as some tools write them."""
    edit_common(path, lambda common: common.update(args="--num-layers 12"))


def bytes_damaged(path: Path, key: str) -> str:
    """A block of a disk reads as zeros: the checksum of the entry no longer fits."""
    with (path / "release" / ".metadata").open("rb") as stream:
        content = pickle.load(stream)
    info = content.storage_data[index_of(content, key)]
    with (path / "release" / info.relative_path).open("r+b") as stream:
        stream.seek(info.offset + info.length // 2)
        stream.write(bytes(512))
    return "checksum"


def padded(fill: Callable[[Tensor], Tensor]) -> Damage:
    """The embedding with 32 rows more, as for some tensor parallel sizes; their bytes are appended to the file."""

    def damage(path: Path, key: str) -> None:
        file = path / "release" / FILE
        end = file.stat().st_size

        def change(content: Metadata) -> None:
            entry, info = content.state_dict_metadata[key], content.storage_data[index_of(content, key)]
            before = Blob(file, info.offset, info.length).tensor(dtype_name(entry.properties.dtype), tuple(entry.size))
            after = torch.cat([before, fill(before[:32])])
            with file.open("ab") as stream:
                written = stream.write(saved(after))
            entry.size = torch.Size(after.shape)
            entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), entry.size)]
            info.offset, info.length = end, written

        models.edit_metadata(path / "release", change)
        edit_common(path, lambda common: setattr(common["args"], "padded_vocab_size", 384))

    return damage


MUTATIONS = {
    # The directory
    "tracker of an iteration that is not there": Mutation("F10", "CK111", tracker("400"), ROOT),
    "tracker empty": Mutation("F10", "CK111", tracker(""), ROOT),
    "tracker that is not a number": Mutation("F10", "CK111", tracker("iter_0000001"), ROOT),
    "release never moved into place": Mutation("F10", "CK111", not_moved, ROOT),
    ".metadata missing": Mutation("F2 F10", "CK111", gone, at(".metadata", QWEN, GLM)),
    "metadata.json missing": Mutation("F10", "CK111", gone, at("metadata.json", QWEN, DEEPSEEK)),
    "common.pt missing": Mutation("F10", "CK111", gone, at("common.pt", QWEN, QWEN3)),
    ".metadata of garbage": Mutation("F2", "CK111", garbage, {QWEN: ".metadata"}),
    "common.pt of garbage": Mutation("F2", "CK111", garbage, {QWEN: "common.pt"}),
    "another backend": Mutation("F10", "CK111", backend(sharded_backend="zarr"), {QWEN: "metadata.json"}),
    "arguments that are a text": Mutation("F5", "CK111", arguments_gone, {QWEN: "release"}),
    # Entries
    "data file missing": Mutation("F2", "CK112", gone, DATA),
    "data file cut short": Mutation("F2", "CK112", sized(lambda size: size * 2 // 3), DATA),
    "data file empty": Mutation("F2", "CK112", sized(lambda size: 0), DATA),
    "data file of an earlier save": Mutation("F22", "CK112", stray, {QWEN: "__7_0.distcp"}, severity="warning"),
    "entry beyond its file": Mutation("F2", "CK112", metadata(beyond), WEIGHT),
    "entry in a file that is not there": Mutation("F2", "CK112", metadata(in_another_file), WEIGHT),
    "entry inside another": Mutation("F2", "CK112", metadata(moved(-10)), WEIGHT),
    "entry too short for its tensor": Mutation("F2", "CK117", metadata(shorter), WEIGHT),
    "bytes behind the last entry": Mutation(
        "F2 F22", "CK117", sized(lambda size: size + 4096), DATA, severity="warning"
    ),
    # Chunks
    "rows in no chunk": Mutation("F2 F4", "CK113", metadata(hole), WEIGHT),
    "rows in two chunks": Mutation("F22", "CK113", metadata(overlap), WEIGHT),
    "expert in no chunk": Mutation("F8", "CK113", metadata(expert_lost), at(EXPERTS, QWEN3, GLM, DEEPSEEK)),
    # Keys
    "key lost": Mutation(
        "F1 F20",
        "CK104",
        metadata(lost),
        {
            QWEN: "decoder.layers.3.mlp.linear_fc2.weight",
            GLM: "decoder.layers.3.mlp.router.expert_bias",
            DEEPSEEK: "decoder.layers.4.self_attention.linear_kv_down_proj.weight",
        },
    ),
    "key that no rule knows": Mutation(
        "F20 F27", "CK104", metadata(added), {QWEN: "decoder.layers.3.post_self_attn_layernorm.weight"}
    ),
    "stored layer lost": Mutation("F5 F21", "CK104", layer_lost, {QWEN: "decoder.layers.11."}),
    "stored MTP layer lost": Mutation("F6", "CK114", layer_lost, at("mtp.layers.0.", GLM, DEEPSEEK)),
    "stored output layer lost": Mutation("F19", "CK104", metadata(lost), at("output_layer.weight", GLM, QWEN3)),
    "an expert fewer": Mutation(
        "F8",
        "CK104",
        metadata(fewer_experts, "decoder.layers.5.mlp.experts.experts.11.linear_fc2.weight"),
        {QWEN3: EXPERTS},
    ),
    "stored weight turned": Mutation("F7", "CK105", metadata(reshaped), WEIGHT),
    "content_metadata says stacked layers": Mutation(
        "F20", "CK115", layout_said(non_homogeneous_layers=False), {QWEN: "decoder.layers."}
    ),
    "content_metadata says experts apart": Mutation(
        "F20", "CK115", layout_said(singleton_local_shards=True), {GLM: "experts", QWEN: "linear_fc1"}
    ),
    "one layer stacked, the others not": Mutation("F20", "CK115", metadata(stacked, "all layers stacked"), {QWEN: FC1}),
    "extra states lost": Mutation("F20", "CK116", extra_states_lost, at("_extra_state", QWEN, GLM)),
    "one extra state lost": Mutation(
        "F20",
        "CK116",
        metadata(lost, "decoder.layers.5.mlp.experts.experts.linear_fc1._extra_state"),
        {QWEN3: "decoder.layers.5.mlp.experts.experts.linear_fc1._extra_state/shard_3_12"},
    ),
    # Bytes
    "stored bytes damaged": Mutation("F2", "CK201", bytes_damaged, WEIGHT),
    "padding rows that are not zero": Mutation("F23", "CK209", padded(lambda rows: rows), at(EMBEDDING, QWEN, GLM)),
}
