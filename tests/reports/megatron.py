"""Reports about the files of Megatron checkpoints: trackers, .metadata and .distcp files that are not whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from mutations.torch_dist_edits import TRACKER
from support import models
from torch.distributed.checkpoint.metadata import Metadata

from reports.files import VERIFY, on_checkpoint
from reports.report import Report

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


REPORTS = (
    Report(
        "ms-swift#10045",
        "2026-09",
        "A patched reader swallows the error of a missing .distcp file: the tensors in it keep their initial values, "
        "and the load succeeds.",
        VERIFY,
        "qwen3_moe/megatron",
        "CK112",
        (".distcp",),
        on_checkpoint(lambda path: min((path / "release").glob("*.distcp")).unlink()),
    ),
    Report(
        "NeMo#14851",
        "2025-09",
        "Of some saves `KeyError: MetadataIndex(...)`: .metadata names a piece of a tensor and not where it lies.",
        VERIFY,
        "qwen3_moe/megatron",
        "CK111",
        (QKV,),
        on_checkpoint(lambda path: models.edit_metadata(path / "release", _piece_without_place)),
    ),
    Report(
        "Megatron-Bridge#829",
        "2025-10",
        "A checkpoint without latest_checkpointed_iteration.txt: Megatron-LM finds nothing in it and starts anew.",
        "ckptkit preflight --hf-checkpoint RELEASE --ref-load CKPT",
        "qwen3_moe/megatron",
        "CK712",
        ("tracker",),
        _no_tracker,
    ),
    Report(
        "ms-swift#7628",
        "2026-01",
        "Nodes do not share the directory of --save: the one that loads sees iterations and no tracker.",
        "ckptkit preflight --hf-checkpoint RELEASE --load RUN --ref-load CKPT",
        "qwen3_moe/megatron",
        "CK711",
        ("no tracker",),
        lambda work: (work / "RUN" / TRACKER).unlink(),
        _resumes,
    ),
)
