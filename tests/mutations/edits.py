"""Edits of a checkpoint directory that leave everything else as it was, index and checksums included."""

import json
import pickle
import zlib

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptkit.core.dtypes import dtype_name
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.saved_tensor import SavedLayout
from ckptkit.storage.buffers import bytes_of

INDEX = "model.safetensors.index.json"


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=2) + "\n")


def edit_config(path, **values):
    """Sets keys of config.json, or removes those that are `...`. Returns the path."""
    return _edit_keys(path, (), values)


def edit_quantization(path, keys, value):
    """Sets the key of quantization_config to which these lead, or removes it. Returns the path."""
    return _edit_keys(path, ("quantization_config", *keys[:-1]), {keys[-1]: value})


def _edit_keys(path, parents, values):
    def change(config):
        for parent in parents:
            config = config[parent]
        config.update(values)
        for key in [key for key, value in values.items() if value is ...]:
            del config[key]

    edit_json(path / "config.json", change)
    return path


def edit_index(path, change):
    edit_json(path / INDEX, lambda content: change(content["weight_map"]))


def shard_of(path, name):
    return path / json.loads((path / INDEX).read_text())["weight_map"][name]


def edit_header(file, change):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def tensor(path, name):
    with safe_open(shard_of(path, name), "pt") as file:
        return file.get_tensor(name)


def names(path, part):
    return [name for name in json.loads((path / INDEX).read_text())["weight_map"] if part in name]


def replace(path, new, old=()):
    """Puts tensors in place of those of the same name, or beside `old` (which go); index and total_size stay true."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    beside = weight_map[next(iter(old))] if old else next(reversed(weight_map.values()))
    homes = {name: weight_map.get(name, beside) for name in (*new, *old)}
    for file in sorted(set(homes.values())):
        kept = {name: found for name, found in load_file(path / file).items() if name not in homes}
        save_file(
            kept | {name: found.contiguous() for name, found in new.items() if homes[name] == file},
            path / file,
            metadata={"format": "pt"},
        )
    for name in old:
        del weight_map[name]
    write_index(path, weight_map | {name: homes[name] for name in new})


def write_index(path, weight_map):
    total = sum(data_bytes(path / file) for file in set(weight_map.values()))
    (path / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    )


def data_bytes(file):
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def rename(path, new_name):
    weight_map = {}
    for file in sorted(path.glob("*.safetensors")):
        content = {new_name(name): found for name, found in load_file(file).items()}
        save_file(content, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file.name)
    write_index(path, weight_map)


def edit_common(path, change):
    file = path / "release" / "common.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def stored_tensor(path, key, expert=0):
    blob, shape, dtype = _stored(path, key, expert)
    return blob.tensor(dtype, shape)


def edit_stored(path, key, change, expert=0):
    """Changes its bytes where they lie; the checksum is that of the new bytes."""
    blob, shape, dtype = _stored(path, key, expert)
    changed = change(blob.tensor(dtype, shape))
    with blob.path.open("r+b") as stream:
        stream.seek(blob.offset)
        stream.write(saved(changed))


def saved(tensor):
    layout, content = (
        SavedLayout.of(tuple(tensor.shape), dtype_name(tensor.dtype)),
        bytes(bytes_of(tensor.contiguous())),
    )
    crc = zlib.crc32(content)
    return layout.header(crc) + content + layout.trailer(crc)


def _stored(path, key, expert):
    with (path / "release" / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    entry = metadata.state_dict_metadata[key]
    chunk = next(chunk for chunk in entry.chunks if chunk.offsets[0] == expert)
    info = next(
        info for index, info in metadata.storage_data.items() if index.fqn == key and index.offset == chunk.offsets
    )
    return (
        Blob(path / "release" / info.relative_path, info.offset, info.length),
        tuple(chunk.sizes),
        dtype_name(entry.properties.dtype),
    )
