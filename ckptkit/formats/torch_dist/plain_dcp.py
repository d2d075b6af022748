"""Tells torch's own distributed checkpoints (DCP) from Megatron's torch_dist, which uses the same kind of files."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ckptkit.core.errors import UnsupportedError

_OF_MEGATRON = re.compile(r"(?:^|\.)(?:(?:decoder|encoder|mtp)\.layers\.|embedding\.word_embeddings\.|output_layer\.)")
# What Megatron-LM puts into every state dict beside the weights, and a pipeline chunk of a model.
_ARGUMENTS = {"args", "checkpoint_version"}
_CHUNK = re.compile(r"model\d+\.")
_KEEP = "keep this directory: ckptkit has not looked at what is in it"


def refuse_plain_dcp(path: Path, keys: Collection[str], by_torch: bool) -> None:
    """Raises UnsupportedError, naming the format, where `path` is a DCP checkpoint and none of torch_dist.

    It may be sound. `keys` are those of its `.metadata`, and `by_torch` whether that says how names are nested. One of
    torch_dist whose metadata.json and common state were lost is left to those who ask for them. Megatron-LM's of FSDP
    runs are read (`fsdp.py`), and have the keys of torch_dist by now.

    Source: Megatron-LM `training/checkpointing.py` (`save_checkpoint`, `generate_state_dict`): for `fsdp_dtensor` and
    `torch_dcp` it calls torch's `save`, which writes neither file and, unlike Megatron's planner, how names are nested.
    """
    apart = (path / "metadata.json").exists() or (path / "common.pt").exists()
    if apart or any(key.startswith("common_state") for key in keys):
        return
    if not keys or (not by_torch and any(map(_OF_MEGATRON.search, keys))):
        return
    what, hint = _named(keys)
    raise UnsupportedError(f"{path} is {what}, which ckptkit does not read", f"{hint}; {_KEEP}")


def _named(keys: Collection[str]) -> tuple[str, str]:
    """The format in words, and what to do."""
    if _ARGUMENTS.issubset(key.partition(".")[0] for key in keys) and any(map(_CHUNK.match, keys)):
        return (
            "a checkpoint of Megatron-FSDP in pipeline chunks",
            "Megatron-LM 0.16 to 0.19 neither saves nor loads those (--ckpt-format fsdp_dtensor): export it to HF from "
            "the program that wrote it (Megatron-Bridge: AutoBridge.save_hf_pretrained)",
        )
    return (
        "a checkpoint of torch.distributed.checkpoint (DCP) and not of Megatron",
        "export it to HF safetensors with the trainer that wrote it, or read it with torch "
        "(`python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`)",
    )
