"""Shards and index of an HF directory: truncated, padded, overlapping, missing, renamed, listed wrongly, left over."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mutations.edits import INDEX, edit_header, edit_index, edit_json, shard_of, tensor, write_index
from mutations.mutation import Damage, Mutation

QWEN, QWEN3, GLM, DEEPSEEK = "qwen2/hf", "qwen3_moe/hf", "glm4_moe/hf", "deepseek_v3/hf"
EXPERT = "model.layers.5.mlp.experts.7.up_proj.weight"
# A weight in the middle of each model, two models at a time.
WEIGHT = {QWEN: "model.layers.3.mlp.up_proj.weight", GLM: EXPERT}
OTHER = {QWEN3: EXPERT, DEEPSEEK: EXPERT}
PACKED = {
    "glm4_moe/int4": "model.layers.5.mlp.experts.7.up_proj.weight_packed",
    "deepseek_v3/int4": "model.layers.0.mlp.gate_proj.weight_packed",
}
NORM = dict.fromkeys(("qwen2/hf", "glm4_moe/hf"), "model.norm.weight")


def on_shard(change: Callable[[Path], object]) -> Damage:
    """Breaks the shard that holds the tensor; a finding has to name the file."""

    def damage(path: Path, name: str) -> str:
        shard = shard_of(path, name)
        change(shard)
        return shard.name

    return damage


def resized(change: int) -> Damage:
    """The shard with so many bytes more or less at its end."""
    return on_shard(lambda shard: os.truncate(shard, shard.stat().st_size + change))


def _overlapping(header: dict[str, Any]) -> None:
    first, second = sorted(
        (entry for name, entry in header.items() if name != "__metadata__"), key=lambda entry: entry["data_offsets"]
    )[:2]
    size = second["data_offsets"][1] - second["data_offsets"][0]
    second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]


def _hole(shard: Path) -> None:
    """64 bytes of nothing before the last tensor, as a writer that aligns every tensor leaves."""
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    last = max(
        (entry for name, entry in header.items() if name != "__metadata__"), key=lambda entry: entry["data_offsets"]
    )
    begin = 8 + length + last["data_offsets"][0]
    last["data_offsets"] = [offset + 64 for offset in last["data_offsets"]]
    text = json.dumps(header).encode()
    shard.write_bytes(
        len(text).to_bytes(8, "little") + text + content[8 + length : begin] + bytes(64) + content[begin:]
    )


def _listed_twice(shard: Path) -> None:
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    name, entry = next(
        (name, entry) for name, entry in json.loads(content[8 : 8 + length]).items() if name != "__metadata__"
    )
    text = content[8 : 8 + length].rstrip()[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}".encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def _lfs_pointer(shard: Path) -> None:
    shard.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {shard.stat().st_size}\n"
    )


def _renamed(shard: Path) -> None:
    shard.rename(shard.with_name("model-00099-of-00099.safetensors"))


def last_shards_lost(path: Path, name: str) -> str:
    """The last three shards and all that the index says of them are gone; what is left agrees with itself."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    lost = sorted(set(weight_map.values()))[-3:]
    for file in lost:
        (path / file).unlink()
    write_index(path, {key: file for key, file in weight_map.items() if file not in lost})
    return name


def shard_without_index(path: Path, name: str) -> str:
    """One shard in the middle was never written, and neither were its entries."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    lost = weight_map[name]
    (path / lost).unlink()
    write_index(path, {key: file for key, file in weight_map.items() if file != lost})
    return name


def draft_shard_without_index(path: Path, name: str) -> str:
    """As `shard_without_index`; all that is left to see it by is the number of the shard, which the finding names."""
    lost = json.loads((path / INDEX).read_text())["weight_map"][name]
    shard_without_index(path, name)
    return f"number {int(lost[6:11])}"


def ghost_key(path: Path, name: str) -> None:
    edit_index(
        path,
        lambda weight_map: weight_map.update(
            {name: "model-00001-of-" + shard_of(path, "model.norm.weight").name[-17:]}
        ),
    )


def wrong_shard(path: Path, name: str) -> None:
    last = sorted(path.glob("*.safetensors"))[-1]
    assert last != shard_of(path, name)
    edit_index(path, lambda weight_map: weight_map.update({name: last.name}))


def wrong_total(total: Callable[[Path], int | None]) -> Damage:
    """The index with another total_size, or none."""

    def damage(path: Path, name: str) -> None:
        said = total(path)
        edit_json(path / INDEX, lambda index: index.update(metadata={} if said is None else {"total_size": said}))

    return damage


def rows(path: Path) -> int:
    """The sum of len(tensor), which is rows and not bytes."""
    return sum(len(found) for file in path.glob("*.safetensors") for found in load_file(file).values())


def other_count(path: Path, name: str) -> str:
    """Every file is there and listed, under names that claim two more shards. Returns what the names claim."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    renamed = {file: f"{file[:15]}{len(files) + 2:05d}.safetensors" for file in files}
    for file, new in renamed.items():
        (path / file).rename(path / new)
    write_index(path, {key: renamed[file] for key, file in weight_map.items()})
    return f"of-{len(files) + 2}"


def in_two_shards(path: Path, name: str) -> None:
    """A tensor of an earlier save left in another shard."""
    other = next(file for file in sorted(path.glob("*.safetensors")) if file != shard_of(path, name))
    save_file(load_file(other) | {name: tensor(path, name) + 1}, other, metadata={"format": "pt"})


def old_file(path: Path, file: str) -> None:
    save_file({"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}, path / file)


def old_shards(path: Path, name: str) -> str:
    """An earlier save with fewer shards, whose files nobody removed."""
    shutil.copy(shard_of(path, name), path / "model-00001-of-00003.safetensors")
    return "model-00001-of-00003.safetensors"


def outside(path: Path, name: str) -> None:
    edit_index(path, lambda weight_map: weight_map.update({name: "../base/model-00001-of-00002.safetensors"}))


def index_file(change: Callable[[Path], object]) -> Damage:
    def damage(path: Path, name: str) -> None:
        change(path / INDEX)

    return damage


def forgotten(path: Path, name: str) -> None:
    edit_index(path, lambda weight_map: weight_map.pop(name))


INDEX_ONLY = {QWEN: INDEX, "glm4_moe/int4": INDEX}

MUTATIONS = (
    Mutation(
        "shard missing",
        "one weight file was not copied",
        ("F1", "F2"),
        "CK102",
        on_shard(Path.unlink),
        WEIGHT | PACKED,
        ("verl#4338",),
    ),
    Mutation(
        "shard short by a byte",
        "a copy stopped just before its end",
        ("F2",),
        "CK102",
        resized(-1),
        WEIGHT,
        ("vmlx-swift#217",),
    ),
    Mutation(
        "shard short by a third",
        "a download stopped",
        ("F2",),
        "CK102",
        on_shard(lambda shard: os.truncate(shard, shard.stat().st_size * 2 // 3)),
        WEIGHT | PACKED,
        ("vmlx-swift#217",),
    ),
    Mutation(
        "shard empty",
        "a file system out of space",
        ("F2",),
        "CK102",
        on_shard(lambda shard: os.truncate(shard, 0)),
        OTHER,
        ("sglang#32279",),
    ),
    Mutation(
        "shard of only a header",
        "the header is there and no data",
        ("F2",),
        "CK102",
        on_shard(lambda s: os.truncate(s, 90)),
        WEIGHT,
    ),
    Mutation(
        "shard with bytes behind its data",
        "a shorter file was written over a longer one",
        ("F2", "F22"),
        "CK102",
        resized(4096),
        WEIGHT | PACKED,
    ),
    Mutation(
        "shard is a Git LFS pointer",
        "a clone without the large files",
        ("F2",),
        "CK102",
        on_shard(_lfs_pointer),
        WEIGHT | PACKED,
    ),
    Mutation(
        "tensors overlap",
        "two tensors share bytes",
        ("F2",),
        "CK102",
        on_shard(lambda s: edit_header(s, _overlapping)),
        OTHER,
    ),
    Mutation("hole between tensors", "a writer that pads each tensor", ("F2",), "CK102", on_shard(_hole), WEIGHT),
    Mutation(
        "name twice in a header",
        "two writers appended to one header",
        ("F22",),
        "CK102",
        on_shard(_listed_twice),
        OTHER,
    ),
    Mutation("shard renamed", "a file got another number", ("F1",), "CK102", on_shard(_renamed), WEIGHT),
    Mutation(
        "last shards lost, index agrees",
        "the export went over a shorter list of shards and wrote an index of what it wrote",
        ("F1",),
        "CK104",
        last_shards_lost,
        {QWEN3: "model.norm.weight", GLM: "model.norm.weight", "glm4_moe/int4": "model.norm.weight"},
        ("Megatron-Bridge#4188", "Megatron-Bridge#4189"),
    ),
    Mutation(
        "shard never written, index agrees",
        "a shard that also holds tensors of another rank was never complete, so it was never written",
        ("F1", "F6"),
        "CK104",
        shard_without_index,
        {QWEN: "model.layers.3.mlp.up_proj.weight"},
        ("verl#6821",),
    ),
    Mutation(
        "shard with all of multi-token prediction never written, index agrees",
        "the shards of the draft layer were not exported, and releases that leave it out on purpose look like this "
        "but for the numbers of their shards",
        ("F1", "F6"),
        "CK108",
        draft_shard_without_index,
        {DEEPSEEK: "model.layers.12.shared_head.norm.weight"},
        ("verl#6821",),
    ),
    Mutation(
        "ghost key",
        "the index lists a tensor that no shard holds",
        ("F1",),
        "CK104",
        ghost_key,
        {QWEN: "model.layers.12.mlp.up_proj.weight", GLM: "model.layers.5.mlp.experts.12.up_proj.weight"},
        ("Relax#148",),
    ),
    Mutation(
        "key that the index forgot",
        "a tensor is in a shard that no loader opens for it",
        ("F1",),
        "CK104",
        forgotten,
        WEIGHT | PACKED,
    ),
    Mutation(
        "key in another shard than listed",
        "the index is of another cut into shards",
        ("F1",),
        "CK104",
        wrong_shard,
        OTHER,
    ),
    Mutation(
        "tensor in two shards",
        "a forced second export left its predecessor's shards",
        ("F22",),
        "CK104",
        in_two_shards,
        NORM,
    ),
    Mutation(
        "file of an earlier save",
        "a forced second export left a file",
        ("F22",),
        "CK104",
        old_file,
        {QWEN: "old.safetensors"},
    ),
    Mutation(
        "shard of an earlier save",
        "an export with fewer shards was there before",
        ("F22",),
        "CK104",
        old_shards,
        WEIGHT,
    ),
    Mutation("index points out of the directory", "weights of a base model are read", ("F1",), "CK103", outside, OTHER),
    Mutation(
        "index missing", "the shards were copied without it", ("F1",), "CK103", index_file(Path.unlink), INDEX_ONLY
    ),
    Mutation(
        "index cut short",
        "a download stopped",
        ("F2",),
        "CK103",
        index_file(lambda file: os.truncate(file, 200)),
        INDEX_ONLY,
    ),
    Mutation(
        "index without a weight_map",
        "another tool's index",
        ("F1",),
        "CK103",
        index_file(lambda file: file.write_text("{}")),
        INDEX_ONLY,
    ),
    Mutation(
        "total_size counts rows",
        "total_size is the sum of len(tensor)",
        ("F22",),
        "CK106",
        wrong_total(rows),
        INDEX_ONLY,
        severity="warning",
    ),
    Mutation(
        "total_size of another save",
        "back-filled tensors were counted twice",
        ("F22",),
        "CK106",
        wrong_total(lambda path: 2 * sum(f.stat().st_size for f in path.glob("*.safetensors"))),
        INDEX_ONLY,
        severity="warning",
    ),
    Mutation(
        "total_size left out",
        "an index written by hand",
        ("F22",),
        "CK106",
        wrong_total(lambda path: None),
        INDEX_ONLY,
        severity="warning",
    ),
    Mutation(
        "file names count other shards",
        "the files say of-N and there are fewer",
        ("F1",),
        "CK108",
        other_count,
        {QWEN: "of-", GLM: "of-"},
        ("slime debug.md",),
    ),
)
