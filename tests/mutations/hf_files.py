"""Ways to break the files of an HF directory: shards, index, config.json and what is beside the weights."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mutations.edits import INDEX, edit_config, edit_header, edit_index, edit_json, shard_of, tensor, write_index


def weight_map(path):
    return json.loads((path / INDEX).read_text())["weight_map"]


# Changes of one file.


CHANGES = {
    "removed": Path.unlink,
    "cut": lambda size: lambda file: os.truncate(file, size),
    "resized": lambda change: lambda file: os.truncate(file, file.stat().st_size + change),
    "cut_by_a_third": lambda file: os.truncate(file, file.stat().st_size * 2 // 3),
    "emptied": lambda file: file.write_text("{}"),
    "renumbered": lambda shard: shard.rename(shard.with_name("model-00099-of-00099.safetensors")),
}


def lfs_pointer(shard):
    content = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {shard.stat().st_size}\n"
    shard.write_text(content)


def overlapping(shard):
    """The second tensor begins where the first does."""

    def change(header):
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        first, second = sorted(entries, key=lambda entry: entry["data_offsets"])[:2]
        size = second["data_offsets"][1] - second["data_offsets"][0]
        second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]

    edit_header(shard, change)


def with_hole(shard):
    """64 bytes of nothing before the last tensor, as a writer that aligns every tensor leaves."""
    begin = 0

    def change(header):
        nonlocal begin
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        last = max(entries, key=lambda entry: entry["data_offsets"])
        begin = last["data_offsets"][0]
        last["data_offsets"] = [offset + 64 for offset in last["data_offsets"]]

    edit_header(shard, change)
    content = shard.read_bytes()
    begin += 8 + int.from_bytes(content[:8], "little")
    shard.write_bytes(content[:begin] + bytes(64) + content[begin:])


def listed_twice(shard):
    """The header has the first name again, which no dictionary can hold."""
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name, entry = next((name, entry) for name, entry in header.items() if name != "__metadata__")
    text = content[8 : 8 + length].rstrip()[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}".encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


# Shards and index.


def on_shard(path, name, change):
    """Breaks the shard that holds the tensor; a finding has to name the file."""
    shard = shard_of(path, name)
    change(shard)
    return shard.name


def index_file(path, name, change):
    change(path / INDEX)


def last_shards_lost(path, name):
    """The last three shards and their part of the index are gone; what is left agrees with itself."""
    names = weight_map(path)
    lost = sorted(set(names.values()))[-3:]
    for file in lost:
        (path / file).unlink()
    write_index(path, {key: file for key, file in names.items() if file not in lost})


def shard_without_index(path, name):
    names = weight_map(path)
    (path / names[name]).unlink()
    write_index(path, {key: file for key, file in names.items() if file != names[name]})


def draft_shard_without_index(path, name):
    """All that is left to see it by is the number of the shard, which the finding names."""
    number = int(weight_map(path)[name][6:11])
    shard_without_index(path, name)
    return f"number {number}"


def ghost_key(path, name):
    first = "model-00001-of-" + shard_of(path, "model.norm.weight").name[-17:]
    edit_index(path, lambda names: names.update({name: first}))


def wrong_shard(path, name):
    last = sorted(path.glob("*.safetensors"))[-1]
    assert last != shard_of(path, name)
    edit_index(path, lambda names: names.update({name: last.name}))


def outside(path, name):
    edit_index(path, lambda names: names.update({name: "../base/model-00001-of-00002.safetensors"}))


def forgotten(path, name):
    edit_index(path, lambda names: names.pop(name))


def wrong_total(path, name, total):
    edit_json(path / INDEX, lambda index: index.update(metadata={"total_size": total(path)}))


def no_total(path, name):
    edit_json(path / INDEX, lambda index: index.update(metadata={}))


def rows(path):
    return sum(len(found) for file in path.glob("*.safetensors") for found in load_file(file).values())


def twice_the_bytes(path):
    return 2 * sum(file.stat().st_size for file in path.glob("*.safetensors"))


def other_count(path, name):
    """Every file is there and listed, under names that claim two more shards. Returns what the names claim."""
    names = weight_map(path)
    files = sorted(set(names.values()))
    renamed = {file: f"{file[:15]}{len(files) + 2:05d}.safetensors" for file in files}
    for file, new in renamed.items():
        (path / file).rename(path / new)
    write_index(path, {key: renamed[file] for key, file in names.items()})
    return f"of-{len(files) + 2}"


def in_two_shards(path, name):
    """A tensor of an earlier save left in another shard."""
    other = next(file for file in sorted(path.glob("*.safetensors")) if file != shard_of(path, name))
    save_file(load_file(other) | {name: tensor(path, name) + 1}, other, metadata={"format": "pt"})


def old_file(path, file):
    save_file({"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}, path / file)


def old_shards(path, name):
    """An earlier save with fewer shards, whose files nobody removed."""
    shutil.copy(shard_of(path, name), path / "model-00001-of-00003.safetensors")
    return "model-00001-of-00003.safetensors"


# config.json and the files beside the weights.


def config(path, place, values):
    edit_config(path, **values)


def rope(path, place, values):
    edit_json(path / "config.json", lambda content: content["rope_parameters"].update(values))


def without_rope(path, place):
    """What a reader of the other spelling sees: no rotary settings at all."""
    edit_json(path / "config.json", lambda content: content.pop("rope_parameters"))


def json_file(path, place, file, values):
    edit_json(path / file, lambda content: content.update(values))


def words_exchanged(path, file):
    edit_json(path / file, lambda content: content["model"]["vocab"].update(w10=11, w11=10))


def more_tokens(path, file):
    """As many added tokens as a fine-tuning recipe adds without resizing the embedding."""

    def change(content):
        special, ids = content["added_tokens"][-1], range(340, 400)
        content["added_tokens"] += [special | {"id": number, "content": f"<extra{number}>"} for number in ids]

    edit_json(path / file, change)


def text(path, file, content):
    (path / file).write_text(content)


def no_file(path, file):
    (path / file).unlink()


def append_newline(path, file):
    (path / file).write_text((path / file).read_text() + "\n")


def adapter_files(path, file):
    text(path, file, '{"peft_type": "LORA", "r": 8}')
