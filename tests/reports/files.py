"""Reports about files that are not whole: shards, indexes, downloads, Megatron's trackers and .distcp files."""

import json
import os
import shutil

import torch
from mutations.edits import INDEX, edit_index, names, shard_of, tensor, write_index
from mutations.hf_files import in_two_shards
from mutations.torch_dist import TRACKER
from safetensors.torch import save_file
from support import models
from support.fake_hub import download
from support.fsdp_saves import save_fsdp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from reports.changes import changed, dropped, on_checkpoint, steps, without_tensors
from reports.report import Case

LAST = "model.layers.11."
EXPERT = "model.layers.5.mlp.experts.7.up_proj.weight"
QKV = "decoder.layers.3.self_attention.linear_qkv.weight"
# A run of slime that goes on, but for its number of rollouts.
_GOES_ON = (
    "ckptkit preflight --hf-checkpoint RELEASE --load RUN --ref-load CKPT --strict -- "
    "python3 train.py --rollout-batch-size 8 --num-rollout"
)


def without_shards(*parts):
    """The files that hold tensors with these parts in their names are not written; the index names none of them."""

    def damage(path):
        lost = {shard_of(path, name) for part in parts for name in names(path, part)}
        for file in lost:
            file.unlink()
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        gone = {file.name for file in lost}
        write_index(path, {name: file for name, file in weight_map.items() if file not in gone})

    return on_checkpoint(damage)


def _unlisted(path):
    """The index lacks the experts that other ranks than the first own."""
    own = [name for name in names(path, ".mlp.experts.") if int(name.split(".experts.")[1].split(".")[0]) >= 6]
    edit_index(path, lambda weight_map: [weight_map.pop(name) for name in own])


def _ghosts(path):
    ghosts = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    edit_index(
        path,
        lambda weight_map: weight_map.update(
            {f"model.layers.12.{name}": next(iter(weight_map.values())) for name in ghosts}
        ),
    )


def _downloaded(work, **where):
    """Where huggingface_hub itself puts the checkpoint, in place of which it then is."""
    (work / "CKPT").rename(work / "published")
    return download("org/model", work / "published", **where)


def _in_cache(work):
    (work / "CKPT").symlink_to(_downloaded(work, cache_dir=work / "cache"))


def _received(path):
    """Other bytes in one matrix, as of a download: the file is as old as it was."""
    name = names(path, f"{LAST}mlp.down_proj.weight")[0]
    file = shard_of(path, name)
    before, content = file.stat().st_mtime, bytearray(file.read_bytes())
    content[-1] ^= 0x01
    file.write_bytes(content)
    os.utime(file, (before, before))


def _dangling(path):
    file = shard_of(path, f"{LAST}self_attn.q_proj.weight")
    blob = path / "blobs" / "0badc0de"
    file.unlink()
    file.symlink_to(blob)


def _linked(work):
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


def _overlay(path):
    """New values of some tensors in a file of their own, which the index names; the old ones are still stored."""
    changed = names(path, ".self_attn.o_proj.weight")
    save_file({name: tensor(path, name) * 1.5 for name in changed}, path / "model-overlay.safetensors")
    edit_index(path, lambda weight_map: weight_map.update(dict.fromkeys(changed, "model-overlay.safetensors")))


def _stray(path):
    """One file of a 4-bit conversion beside the shards of the model in BF16."""
    codes = {
        name: torch.ones(tensor(path, name).shape[0], 24, dtype=torch.uint32) for name in names(path, "_proj.weight")
    }
    save_file(codes, path / "model.safetensors", metadata={"format": "mlx"})


def _renumbered(path):
    files = sorted(path.glob("*.safetensors"))
    for number, file in enumerate(files, 1):
        file.rename(path / f"model-{number:05d}-of-{len(files) + 2:05d}.safetensors")


def _piece_without_place(content):
    """storage_data has no entry for a piece that the tensor's chunks name."""
    index = next(index for index in content.storage_data if index.fqn == QKV)
    del content.storage_data[index]


def _resumes(work):
    root = work / "CKPT"
    shutil.copytree(root / "release", work / "RUN" / "iter_0000010")
    common = torch.load(work / "RUN" / "iter_0000010" / "common.pt", weights_only=False)
    torch.save({**common, "iteration": 10}, work / "RUN" / "iter_0000010" / "common.pt")
    shutil.copytree(root / "hf", work / "RUN" / "hf")
    (work / "RUN" / TRACKER).write_text("10")


def _common_state_as_an_object(work):
    """As megatron-core 0.19 saves: what common.pt held is an object among the .distcp files."""
    path, key, name = work / "CKPT" / "release", "common_state/shard_0_1", "__0_9.distcp"
    common = path / "common.pt"

    def add(content):
        content.state_dict_metadata[key] = BytesStorageMetadata()
        content.storage_data[MetadataIndex(key)] = _StorageInfo(name, 0, common.stat().st_size)

    models.edit_metadata(path, add)
    common.rename(path / name)


def _fsdp(work):
    """What Megatron-FSDP leaves: torch's own save, without metadata.json and common.pt."""
    save_fsdp(work / "CKPT" / "release", work / "saved")
    shutil.move(work / "CKPT" / "hf", work / "saved" / "hf")
    shutil.rmtree(work / "CKPT")
    (work / "saved").rename(work / "CKPT")


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
    "Relax#148": Case("glm4_moe/hf", ("model.layers.12.",), steps(dropped("model.layers.12."), on_checkpoint(_ghosts))),
    "sglang#32279": Case(
        "qwen3_moe/hf",
        (".safetensors",),
        on_checkpoint(lambda path: shard_of(path, f"{LAST}self_attn.q_proj.weight").unlink()),
    ),
    "vllm#34930": Case(
        "qwen2-untied-tiles/int4", ("model.layers.11.",), without_shards("model.layers.11.mlp.down_proj.")
    ),
    "ms-swift#9325": Case("qwen3_moe/hf", (".mlp.experts.",), without_tensors(".mlp.experts.")),
    "ms-swift#6644": Case("qwen3_moe/hf", (LAST,), without_tensors(LAST)),
    "slime#309": Case("glm4_moe/hf", ("model.layers.12.",), without_tensors("model.layers.12.")),
    "ms-swift#9504": Case("qwen3_5/hf", ("mtp.",), without_tensors("mtp.")),
    "aprender#2337": Case(
        "qwen2-untied/hf",
        ("model.layers.11.mlp.down_proj.weight",),
        changed(f"{LAST}mlp.down_proj.weight", torch.zeros_like),
    ),
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
        "qwen3_moe/hf",
        ("self_attn.k_proj.weight", "zero", "12"),
        changed("self_attn.[qkv]_proj.weight", torch.zeros_like),
    ),
    "vllm#54230": Case("qwen3_moe/hf", (EXPERT, "shard"), on_checkpoint(lambda path: in_two_shards(path, EXPERT))),
    "colibri#1479": Case("qwen3_moe/hf", ("o_proj", "model-overlay.safetensors"), on_checkpoint(_overlay)),
    "mlx-vlm#1464": Case("qwen2-untied/hf", ("transformers reads model.safetensors",), on_checkpoint(_stray)),
    "mlx-vlm#1827": Case("qwen2-untied/hf", ("index", "14 more: missing"), on_checkpoint(_renumbered)),
    "ms-swift#10045": Case(
        "qwen3_moe/megatron",
        (".distcp",),
        on_checkpoint(lambda path: min((path / "release").glob("*.distcp")).unlink()),
    ),
    "NeMo#14851": Case(
        "qwen3_moe/megatron",
        (QKV,),
        on_checkpoint(lambda path: models.edit_metadata(path / "release", _piece_without_place)),
    ),
    "Megatron-Bridge#829": Case(
        "qwen3_moe/megatron", ("tracker",), on_checkpoint(lambda path: (path / TRACKER).unlink())
    ),
    "ms-swift#7628": Case(
        "qwen3_moe/megatron", ("without a tracker",), lambda work: (work / "RUN" / TRACKER).unlink(), _resumes
    ),
    "training-gym#492": Case(
        "qwen3_moe/megatron", ("iteration 10", "training"), prepare=_resumes, twin=f"{_GOES_ON} 12"
    ),
    "ms-swift#9908": Case("qwen3_moe/megatron", prepare=_common_state_as_an_object),
    "Megatron-Bridge#1211": Case("qwen3_moe/megatron", prepare=_fsdp),
}
