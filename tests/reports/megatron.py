"""Reports about the files of Megatron checkpoints: trackers, .metadata and .distcp files that are not whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from mutations.torch_dist import TRACKER
from support import models
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from reports.files import on_checkpoint
from reports.report import Case

# A run of slime that goes on, but for its number of rollouts.
_GOES_ON = (
    "ckptkit preflight --hf-checkpoint RELEASE --load RUN --ref-load CKPT --strict -- "
    "python3 train.py --rollout-batch-size 8 --num-rollout"
)
QKV = "decoder.layers.3.self_attention.linear_qkv.weight"


def _piece_without_place(content: Metadata) -> None:
    """storage_data has no entry for a piece that the tensor's chunks name."""
    index = next(index for index in content.storage_data if index.fqn == QKV)
    del content.storage_data[index]


def _no_tracker(work: Path) -> None:
    (work / "CKPT" / TRACKER).unlink()


def _resumes(work: Path) -> None:
    """A run's directory with an iteration, and the tracker that names it."""
    root = work / "CKPT"
    shutil.copytree(root / "release", work / "RUN" / "iter_0000010")
    common = torch.load(work / "RUN" / "iter_0000010" / "common.pt", weights_only=False)
    torch.save({**common, "iteration": 10}, work / "RUN" / "iter_0000010" / "common.pt")
    shutil.copytree(root / "hf", work / "RUN" / "hf")
    (work / "RUN" / TRACKER).write_text("10")


def _common_state_as_an_object(work: Path) -> None:
    """As megatron-core 0.19 saves: what common.pt held is an object among the .distcp files."""
    path, key, name = work / "CKPT" / "release", "common_state/shard_0_1", "__0_9.distcp"
    common = path / "common.pt"

    def add(content: Metadata) -> None:
        content.state_dict_metadata[key] = BytesStorageMetadata()
        content.storage_data[MetadataIndex(key)] = _StorageInfo(name, 0, common.stat().st_size)

    models.edit_metadata(path, add)
    common.rename(path / name)


CASES = {
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
    "Megatron-Bridge#829": Case("qwen3_moe/megatron", ("tracker",), _no_tracker),
    "ms-swift#7628": Case(
        "qwen3_moe/megatron", ("no tracker",), lambda work: (work / "RUN" / TRACKER).unlink(), _resumes
    ),
    "training-gym#492": Case(
        "qwen3_moe/megatron", ("iteration 10", "without a step of training"), prepare=_resumes, twin=f"{_GOES_ON} 12"
    ),
    "ms-swift#9908": Case("qwen3_moe/megatron", prepare=_common_state_as_an_object),
}
