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
from mutations.mutation import UP, Damage, Mutation, at

QWEN, QWEN3, GLM, DEEPSEEK = "qwen2/hf", "qwen3_moe/hf", "glm4_moe/hf", "deepseek_v3/hf"
UNTIED, GLM4 = "qwen2-untied/hf", "glm4_moe/int4"
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
    return lambda path, name: change(path / INDEX)


def forgotten(path: Path, name: str) -> None:
    edit_index(path, lambda weight_map: weight_map.pop(name))


INDEX_ONLY = {QWEN: INDEX, "glm4_moe/int4": INDEX}

MUTATIONS = {
    "shard missing": Mutation("F1 F2", "CK102", on_shard(Path.unlink), WEIGHT | PACKED),
    "shard short by a byte": Mutation("F2", "CK102", resized(-1), WEIGHT),
    "shard short by a third": Mutation(
        "F2", "CK102", on_shard(lambda shard: os.truncate(shard, shard.stat().st_size * 2 // 3)), WEIGHT | PACKED
    ),
    "shard empty": Mutation("F2", "CK102", on_shard(lambda shard: os.truncate(shard, 0)), OTHER),
    "shard of only a header": Mutation("F2", "CK102", on_shard(lambda s: os.truncate(s, 90)), WEIGHT),
    "shard with bytes behind its data": Mutation("F2 F22", "CK102", resized(4096), WEIGHT | PACKED),
    "shard is a Git LFS pointer": Mutation("F2", "CK102", on_shard(_lfs_pointer), WEIGHT | PACKED),
    "tensors overlap": Mutation("F2", "CK102", on_shard(lambda s: edit_header(s, _overlapping)), OTHER),
    "hole between tensors": Mutation("F2", "CK102", on_shard(_hole), WEIGHT),
    "name twice in a header": Mutation("F22", "CK102", on_shard(_listed_twice), OTHER),
    "shard renamed": Mutation("F1", "CK102", on_shard(_renamed), WEIGHT),
    "last shards lost, index agrees": Mutation(
        "F1", "CK104", last_shards_lost, at("model.norm.weight", QWEN3, GLM, "glm4_moe/int4")
    ),
    "shard never written, index agrees": Mutation("F1 F6", "CK104", shard_without_index, {QWEN: UP}),
    "shard with all of multi-token prediction never written, index agrees": Mutation(
        "F1 F6", "CK108", draft_shard_without_index, {DEEPSEEK: "model.layers.12.shared_head.norm.weight"}
    ),
    "ghost key": Mutation(
        "F1",
        "CK104",
        ghost_key,
        {QWEN: "model.layers.12.mlp.up_proj.weight", GLM: "model.layers.5.mlp.experts.12.up_proj.weight"},
    ),
    "key that the index forgot": Mutation("F1", "CK104", forgotten, WEIGHT | PACKED),
    "key in another shard than listed": Mutation("F1", "CK104", wrong_shard, OTHER),
    "tensor in two shards": Mutation("F22", "CK104", in_two_shards, NORM),
    "file of an earlier save": Mutation("F22", "CK104", old_file, {QWEN: "old.safetensors"}),
    "shard of an earlier save": Mutation("F22", "CK104", old_shards, WEIGHT),
    "index points out of the directory": Mutation("F1", "CK103", outside, OTHER),
    "index missing": Mutation("F1", "CK103", index_file(Path.unlink), INDEX_ONLY),
    "index cut short": Mutation("F2", "CK103", index_file(lambda file: os.truncate(file, 200)), INDEX_ONLY),
    "index without a weight_map": Mutation("F1", "CK103", index_file(lambda file: file.write_text("{}")), INDEX_ONLY),
    "total_size counts rows": Mutation("F22", "CK106", wrong_total(rows), INDEX_ONLY, severity="warning"),
    "total_size of another save": Mutation(
        "F22",
        "CK106",
        wrong_total(lambda path: 2 * sum(f.stat().st_size for f in path.glob("*.safetensors"))),
        INDEX_ONLY,
        severity="warning",
    ),
    "total_size left out": Mutation("F22", "CK106", wrong_total(lambda path: None), INDEX_ONLY, severity="warning"),
    "file names count other shards": Mutation("F1", "CK108", other_count, at("of-", QWEN, GLM)),
}
