"""Ways to break a Megatron torch_dist directory: its files, metadata, arguments, values, and optimizer state."""

import pickle
import re

import torch
from support import models
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ckptkit.core.dtypes import dtype_name
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.formats.torch_save.blob import Blob
from mutations.edits import edit_common, edit_json, edit_stored, saved, stored_tensor

TRACKER, FILE = "latest_checkpointed_iteration.txt", "__0_0.distcp"
FC1 = "decoder.layers.3.mlp.linear_fc1.weight"

# Files.


def release_file(path, file, change):
    change(path / "release" / file)


def release_gone(path, file):
    (path / "release" / file).unlink()


def release_garbage(path, file):
    (path / "release" / file).write_bytes(b"garbage")
    return "release"


def stray(path, file):
    (path / "release" / file).write_bytes(b"of an earlier save")


def not_moved(path, file):
    """A converter died after it wrote the tracker and before it moved iter_0000001."""
    (path / "release").rename(path / "iter_0000001")


def another_iteration(path, file):
    """The directory of one iteration under the number of another."""
    (path / "release").rename(path / "iter_0000400")
    (path / file).write_text("400")
    return "iteration 400"


def backend(path, file, name):
    edit_json(path / "release" / file, lambda content: content.update(sharded_backend=name))


# Metadata: which keys and chunks there are, and where they are stored.


def metadata(path, key, change, named=None):
    """`.metadata` has something else for a key; `named` is what a finding names in place of the key."""
    models.edit_metadata(path / "release", lambda content: change(content, key))
    return named


def index_of(content, key):
    return next(index for index in content.storage_data if (index.fqn, index.index) == (key, 0))


def stored_at(content, key):
    return content.storage_data[index_of(content, key)]


def key_lost(content, key):
    del content.state_dict_metadata[key]
    for index in [index for index in content.storage_data if index.fqn == key]:
        del content.storage_data[index]


def added(content, key):
    """A key that no rule knows, with the bytes of another."""
    content.state_dict_metadata[key] = content.state_dict_metadata[FC1]
    content.storage_data[MetadataIndex(key, torch.Size([0, 0]), 0)] = stored_at(content, FC1)


def moved(by):
    def change(content, key):
        stored_at(content, key).offset += by

    return change


def hole(content, key):
    old = index_of(content, key)
    first = content.state_dict_metadata[key].chunks[0]
    content.state_dict_metadata[key].chunks = [
        ChunkStorageMetadata(first.offsets, torch.Size([first.sizes[0] - 8, *first.sizes[1:]]))
    ]
    assert old.offset == first.offsets


def overlap(content, key):
    """The same rows in two chunks."""
    chunks = content.state_dict_metadata[key].chunks
    chunks.append(chunks[0])
    content.storage_data[MetadataIndex(key, chunks[0].offsets, len(chunks) - 1)] = stored_at(content, key)


def expert_lost(content, key):
    """One rank's expert never arrived."""
    content.state_dict_metadata[key].chunks.pop(5)


def fewer_experts(content, key):
    entry = content.state_dict_metadata[key]
    entry.chunks.pop()
    entry.size = torch.Size([entry.size[0] - 1, *entry.size[1:]])


def entry_turned(content, key):
    entry = content.state_dict_metadata[key]
    rows, columns = entry.size
    entry.size = torch.Size([columns, rows])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), entry.size)]


def stacked(content, key):
    """The key of another layout: without the number of its layer."""
    content.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"] = content.state_dict_metadata.pop(key)
    old = index_of(content, key)
    content.storage_data[MetadataIndex("decoder.layers.mlp.linear_fc1.weight", old.offset, 0)] = (
        content.storage_data.pop(old)
    )


def layer_lost(path, prefix):
    def change(content):
        for key in [key for key in content.state_dict_metadata if key.startswith(prefix)]:
            key_lost(content, key)

    models.edit_metadata(path / "release", change)
    # Of a whole multi-token prediction layer it is the training arguments that say that it should be there.
    return prefix + "mlp.linear_fc1.weight" if prefix.startswith("decoder") else prefix + "*"


def extra_states_lost(path, place):
    """All `_extra_state` objects, as a writer leaves them out that knows only tensors."""

    def change(content):
        for key in [key for key in content.state_dict_metadata if "_extra_state" in key]:
            key_lost(content, key)

    models.edit_metadata(path / "release", change)


def padded(path, key, rows=torch.clone):
    """The embedding with 32 rows more, made of its first; the bytes are appended to the file."""
    file = path / "release" / FILE
    end = file.stat().st_size

    def change(content):
        entry, info = content.state_dict_metadata[key], stored_at(content, key)
        before = Blob(file, info.offset, info.length).tensor(dtype_name(entry.properties.dtype), tuple(entry.size))
        after = torch.cat([before, rows(before[:32])])
        with file.open("ab") as stream:
            written = stream.write(saved(after))
        entry.size = torch.Size(after.shape)
        entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), entry.size)]
        info.offset, info.length = end, written

    models.edit_metadata(path / "release", change)
    argument(path, key, "padded_vocab_size", 384)


# Arguments, and the config.json beside them.


def argument(path, place, name, value):
    edit_common(path, lambda common: setattr(common["args"], name, value))


def arguments_gone(path, place):
    """The arguments are a text, as some tools write them."""
    edit_common(path, lambda common: common.update(args="--num-layers 12"))


def layout(path, place, values):
    edit_common(path, lambda common: common["content_metadata"].update(values))


def megatron_config(path, place, values):
    edit_json(path / "hf" / "config.json", lambda config: config.update(values))


def numbered(path, place, number):
    """Every decoder layer is stored under another number; what a finding names is a tensor that is then missing."""

    def other(key):
        return re.sub(r"^(decoder\.layers\.)(\d+)", lambda match: f"{match[1]}{number(int(match[2]))}", key)

    def change(content):
        content.state_dict_metadata = {other(key): entry for key, entry in content.state_dict_metadata.items()}
        content.storage_data = {
            MetadataIndex(other(index.fqn), index.offset, index.index): place
            for index, place in content.storage_data.items()
        }

    models.edit_metadata(path / "release", change)


def nothing(path, place):
    """The checkpoint stays as it is."""


# Values.


def bytes_damaged(path, key):
    """A block of a disk reads as zeros: the checksum of the entry no longer fits."""
    with (path / "release" / ".metadata").open("rb") as stream:
        content = pickle.load(stream)
    info = stored_at(content, key)
    with (path / "release" / info.relative_path).open("r+b") as stream:
        stream.seek(info.offset + info.length // 2)
        stream.write(bytes(512))
    return "checksum"


def stored(path, key, change, expert=0, named=None):
    """A stored tensor, or one expert of it, holds other values; `named` is what a finding calls it."""
    edit_stored(path, key, lambda before: change(before).to(before.dtype).reshape(before.shape), expert)
    return named


def swapped_entries(path, named, first, second):
    values = [stored_tensor(path, key) for key in (second, first)]
    edit_stored(path, first, lambda _: values[0])
    edit_stored(path, second, lambda _: values[1])


def stored_layers_of_stage_0(path, folded):
    """The second of two pipeline stages wrote its layers by their local numbers: 6 to 11 are 0 to 5."""
    for kind in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        for layer in range(6, 12):
            origin = stored_tensor(path, f"decoder.layers.{layer - 6}.{kind}.weight")
            edit_stored(path, f"decoder.layers.{layer}.{kind}.weight", lambda _, origin=origin: origin)


def ungrouped(before):
    """q, k and v above one another, where Megatron has 5 queries, a key and a value for each of 2 groups."""
    groups = before.reshape(2, 7, 32, -1)
    return torch.cat([groups[:, :5].reshape(320, -1), groups[:, 5].reshape(64, -1), groups[:, 6].reshape(64, -1)])


# Optimizer state.


def state(path, key, change, expert=0):
    edit_stored(path, key, change, expert)
    return key.replace(".experts.linear", f".experts.{expert}.linear") if expert else None


def never_stepped(path, kind):
    for key, entry in read_metadata(path / "release").tensors.items():
        if key.startswith(f"optimizer.state.{kind}."):
            for chunk in entry.chunks:
                edit_stored(path, key, torch.zeros_like, *chunk.offsets[:1])
    return f"optimizer.state.{kind}"


CHANGES = {
    "beyond": moved(1 << 30),
    "in_another_file": lambda content, key: setattr(stored_at(content, key), "relative_path", "__3_0.distcp"),
    # An entry that is said to be shorter than its tensor.
    "shorter": lambda content, key: setattr(stored_at(content, key), "length", stored_at(content, key).length // 2),
    "next_number": lambda layer: layer + 1,
    "other_of_two": lambda layer: layer ^ 1,
}
