"""Reports about files: shards, indexes, trackers and downloads that are not whole, and names of another writer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from mutations.edits import INDEX, edit_index, names, replace, shard_of, tensor, write_index
from support.fake_hub import download

from reports.report import Change, Report

VERIFY = "ckptkit verify CKPT"
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


REPORTS = (
    Report(
        "Megatron-Bridge#4188",
        "2026-06",
        "An export without the MTP layer skips each shard of which a tensor is missing: the first and the last ones, "
        "with embedding, last layer and output layer. The index agrees with what is left.",
        VERIFY,
        "glm4_moe_lite/hf",
        "CK104",
        ("model.embed_tokens.weight",),
        without_shards("model.embed_tokens", "model.layers.12.", "lm_head", "model.norm"),
    ),
    Report(
        "AReaL#1403",
        "2026-06",
        "The same writer, MTP head dropped: a shard that holds an MTP tensor too is not written, with the output layer "
        "and two decoder layers; 62 GB of 67.",
        VERIFY,
        "qwen3_5_moe/hf",
        "CK104",
        ("lm_head.weight",),
        without_shards("mtp.", "lm_head", "layers.11.mlp.experts.0."),
    ),
    Report(
        "Megatron-Bridge#4083",
        "2026-06",
        "The names for the index were gathered over pipeline ranks alone: experts of other expert parallel ranks are "
        "stored and not listed.",
        VERIFY,
        "qwen3_moe/hf",
        "CK104",
        (".mlp.experts.",),
        on_checkpoint(_unlisted),
    ),
    Report(
        "Relax#148",
        "2026-07",
        "The exported index lists MTP tensors that were planned and never written.",
        VERIFY,
        "glm4_moe/hf",
        "CK104",
        ("model.layers.12.",),
        on_checkpoint(lambda path: (replace(path, {}, names(path, "model.layers.12.")), _ghosts(path))),
    ),
    Report(
        "sglang#32279",
        "2026-07",
        "A download that stopped: the index names a shard that is not there, the engine leaves its parameters as "
        "memory held them, and answers.",
        VERIFY,
        "qwen3_moe/hf",
        "CK102",
        (".safetensors",),
        on_checkpoint(_shard_gone),
    ),
    Report(
        "vllm#34930",
        "2026-02",
        "The same with an INT4 checkpoint, where the engine does not check completeness at all.",
        VERIFY,
        "qwen2-untied-tiles/int4",
        "CK104",
        ("model.layers.11.",),
        without_shards("model.layers.11.mlp.down_proj."),
    ),
    Report(
        "ms-swift#9325",
        "2026-05",
        "An export of a mixture of experts left every expert out: 11 GB of a 397B model.",
        VERIFY,
        "qwen3_moe/hf",
        "CK104",
        (".mlp.experts.",),
        without_tensors(".mlp.experts."),
    ),
    Report(
        "ms-swift#6644",
        "2025-11",
        "A conversion to HF is short of exactly the last layer.",
        VERIFY,
        "qwen3_moe/hf",
        "CK104",
        (LAST,),
        without_tensors(LAST),
    ),
    Report(
        "slime#309",
        "2025-09",
        "The model script counts one layer less than the release has (its MTP layer), so a round trip always loses it.",
        "ckptkit verify CKPT --source RELEASE",
        "glm4_moe/hf",
        "CK202",
        ("model.layers.12.",),
        without_tensors("model.layers.12."),
    ),
    Report(
        "ms-swift#9504",
        "2026-06",
        "An export from a distributed checkpoint leaves the MTP weights of Qwen3.5 out, and says nothing.",
        "ckptkit verify CKPT --source RELEASE",
        "qwen3_5/hf",
        "CK202",
        ("mtp.",),
        without_tensors("mtp."),
    ),
    Report(
        "aprender#2337",
        "2026-07",
        "A file in the download cache has the right length and zeros where 27 of 339 tensors should be.",
        VERIFY,
        "qwen2-untied/hf",
        "CK205",
        ("model.layers.11.mlp.down_proj.weight",),
        on_checkpoint(_zeroed),
    ),
    Report(
        "huggingface_hub#3643",
        "2025-12",
        "A download succeeds with other bytes than were published; nothing hashes them afterwards.",
        VERIFY,
        "qwen2-untied/hf",
        "CK124",
        ("model.layers.11.", "hf download ", "--force-download"),
        on_checkpoint(_received),
        lambda work: _downloaded(work, local_dir=work / "CKPT"),
    ),
    Report(
        "vllm#53537",
        "2026-08",
        "One shard of a quantized model (INT8 there, INT4 here) has a sound header and wrong bytes; only tool calls "
        "are cut short.",
        VERIFY,
        "qwen2-untied-tiles/int4",
        "CK124",
        ("model.layers.11.", "hf download org/model "),
        on_checkpoint(_received),
        _in_cache,
    ),
    Report(
        "VoiceStudio#1056",
        "2026-07",
        "In the download cache the snapshot's links dangle, so that transformers says that there is no weight file, "
        "with every byte on disk.",
        VERIFY,
        "qwen2-untied/hf",
        "CK102",
        ("link",),
        on_checkpoint(_dangling),
        _linked,
    ),
    Report(
        "prime-rl#3451",
        "2026-09",
        "A trainer that fuses q, k and v loads weights into copies that it does not train, and saves zeros for them.",
        VERIFY,
        "qwen3_moe/hf",
        "CK205",
        ("self_attn.k_proj.weight", "all zero", "12"),
        on_checkpoint(_zero_projections),
    ),
)
