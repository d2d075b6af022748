"""Reports about files: shards, indexes, trackers and downloads that are not whole, and names of another writer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from mutations.edits import INDEX, edit_index, names, replace, shard_of, tensor, write_index
from support.fake_hub import download

from reports.report import Case, Change

LAST = "model.layers.11."


def on_checkpoint(change: Callable[[Path], object]) -> Change:
    """A change of the checkpoint at `CKPT`."""
    return lambda work: change(work / "CKPT")


def without_shards(*parts: str) -> Change:
    """The files that hold tensors with these parts in their names are not written; the index names none of them."""

    def damage(path: Path) -> None:
        lost = {shard_of(path, name) for part in parts for name in names(path, part)}
        for file in lost:
            file.unlink()
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        gone = {file.name for file in lost}
        write_index(path, {name: file for name, file in weight_map.items() if file not in gone})

    return on_checkpoint(damage)


def without_tensors(*parts: str) -> Change:
    """Tensors with these parts in their names are not stored; index and the numbers of files agree."""

    def damage(path: Path) -> None:
        replace(path, {}, [name for part in parts for name in names(path, part)])
        number_files(path)

    return on_checkpoint(damage)


def number_files(path: Path) -> None:
    """Numbers the files anew, without those that hold nothing."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    for file in path.glob("*.safetensors"):
        if file.name not in weight_map.values():
            file.unlink()
    files = sorted(path.glob("*.safetensors"))
    new = {file.name: f"model-{number:05d}-of-{len(files):05d}.safetensors" for number, file in enumerate(files, 1)}
    for file in files:
        file.rename(path / new[file.name])
    write_index(path, {name: new[file] for name, file in weight_map.items()})


def _shard_gone(path: Path) -> None:
    shard_of(path, f"{LAST}self_attn.q_proj.weight").unlink()


def _unlisted(path: Path) -> None:
    """The index lacks the experts that other ranks than the first own."""
    own = [name for name in names(path, ".mlp.experts.") if int(name.split(".experts.")[1].split(".")[0]) >= 6]
    edit_index(path, lambda weight_map: [weight_map.pop(name) for name in own])


def _ghosts(path: Path) -> None:
    ghosts = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    edit_index(
        path,
        lambda weight_map: weight_map.update(
            {f"model.layers.12.{name}": next(iter(weight_map.values())) for name in ghosts}
        ),
    )


def _zeroed(path: Path) -> None:
    name = f"{LAST}mlp.down_proj.weight"
    replace(path, {name: torch.zeros_like(tensor(path, name))})


def _downloaded(work: Path, **where: Path) -> Path:
    """Where huggingface_hub itself puts the checkpoint, in place of which it then is."""
    (work / "CKPT").rename(work / "published")
    return download("org/model", work / "published", **where)


def _in_cache(work: Path) -> None:
    (work / "CKPT").symlink_to(_downloaded(work, cache_dir=work / "cache"))


def _received(path: Path) -> None:
    """Other bytes in one matrix, as of a download: the file is as old as it was."""
    name = names(path, f"{LAST}mlp.down_proj.weight")[0]
    file = shard_of(path, name)
    before, content = file.stat().st_mtime, bytearray(file.read_bytes())
    content[-1] ^= 0x01
    file.write_bytes(content)
    os.utime(file, (before, before))


def _dangling(path: Path) -> None:
    file = shard_of(path, f"{LAST}self_attn.q_proj.weight")
    blob = path / "blobs" / "0badc0de"
    file.unlink()
    file.symlink_to(blob)


def _linked(work: Path) -> None:
    """As the cache of the hub has it: files are links into `blobs`."""
    model = work / "models--org--model"
    path, blobs = model / "snapshots" / "0123abcd", model / "blobs"
    for folder in (path.parent, blobs):
        folder.mkdir(parents=True)
    (work / "CKPT").rename(path)
    for file in sorted(path.glob("*.safetensors")):
        target = blobs / f"{file.stem}-blob"
        file.rename(target)
        file.symlink_to(f"../../blobs/{target.name}")
    (work / "CKPT").symlink_to(path)


def _zero_projections(path: Path) -> None:
    found = [name for part in "qkv" for name in names(path, f"self_attn.{part}_proj.weight")]
    replace(path, {name: torch.zeros_like(tensor(path, name)) for name in found})


CASES = {
    "Megatron-Bridge#4188": Case(
        "glm4_moe_lite/hf",
        ("model.embed_tokens.weight",),
        without_shards("model.embed_tokens", "model.layers.12.", "lm_head", "model.norm"),
    ),
    "AReaL#1403": Case(
        "qwen3_5_moe/hf", ("lm_head.weight",), without_shards("mtp.", "lm_head", "layers.11.mlp.experts.0.")
    ),
    "Megatron-Bridge#4083": Case("qwen3_moe/hf", (".mlp.experts.",), on_checkpoint(_unlisted)),
    "Relax#148": Case(
        "glm4_moe/hf",
        ("model.layers.12.",),
        on_checkpoint(lambda path: (replace(path, {}, names(path, "model.layers.12.")), _ghosts(path))),
    ),
    "sglang#32279": Case("qwen3_moe/hf", (".safetensors",), on_checkpoint(_shard_gone)),
    "vllm#34930": Case(
        "qwen2-untied-tiles/int4", ("model.layers.11.",), without_shards("model.layers.11.mlp.down_proj.")
    ),
    "ms-swift#9325": Case("qwen3_moe/hf", (".mlp.experts.",), without_tensors(".mlp.experts.")),
    "ms-swift#6644": Case("qwen3_moe/hf", (LAST,), without_tensors(LAST)),
    "slime#309": Case("glm4_moe/hf", ("model.layers.12.",), without_tensors("model.layers.12.")),
    "ms-swift#9504": Case("qwen3_5/hf", ("mtp.",), without_tensors("mtp.")),
    "aprender#2337": Case("qwen2-untied/hf", ("model.layers.11.mlp.down_proj.weight",), on_checkpoint(_zeroed)),
    "huggingface_hub#3643": Case(
        "qwen2-untied/hf",
        ("model.layers.11.", "hf download ", "--force-download"),
        on_checkpoint(_received),
        lambda work: _downloaded(work, local_dir=work / "CKPT"),
    ),
    "vllm#53537": Case(
        "qwen2-untied-tiles/int4", ("model.layers.11.", "hf download org/model "), on_checkpoint(_received), _in_cache
    ),
    "VoiceStudio#1056": Case("qwen2-untied/hf", ("link",), on_checkpoint(_dangling), _linked),
    "prime-rl#3451": Case(
        "qwen3_moe/hf", ("self_attn.k_proj.weight", "all zero", "12"), on_checkpoint(_zero_projections)
    ),
}
