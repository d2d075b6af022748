"""Adds optimizer state to a Megatron checkpoint that has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from support import models
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckptkit.core.dtypes import dtype_name
from ckptkit.formats.torch_save.blob import Blob
from mutations.edits import edit_common, saved

KINDS = ("param", "exp_avg", "exp_avg_sq")


def add_optimizer(path: Path) -> None:
    """Adds what `fully_reshardable` of megatron-core's distributed optimizer saves: float32, a key for each weight."""
    torch.manual_seed(0)
    with (path / "release" / "__0_9.distcp").open("wb") as file:

        def add(content: Metadata) -> None:
            weights = [key for key, one in content.state_dict_metadata.items() if hasattr(one, "chunks")]
            for key in weights:
                for kind in KINDS:
                    _add(content, key, kind)

        def _add(content: Metadata, key: str, kind: str) -> None:
            name, entry = f"optimizer.state.{kind}.{key}", content.state_dict_metadata[key]
            content.state_dict_metadata[name] = replace(
                entry, properties=replace(entry.properties, dtype=torch.float32)
            )
            for at, info in [one for one in content.storage_data.items() if one[0].fqn == key]:
                sizes = next(tuple(one.sizes) for one in entry.chunks if one.offsets == at.offset)
                blob = Blob(path / "release" / info.relative_path, info.offset, info.length)
                state = _state(kind, blob.tensor(dtype_name(entry.properties.dtype), sizes))
                begin = file.tell()
                file.write(saved(state))
                content.storage_data[MetadataIndex(name, at.offset, at.index)] = replace(
                    info, relative_path=Path(file.name).name, offset=begin, length=file.tell() - begin
                )

        models.edit_metadata(path / "release", add)
    edit_common(path, lambda common: common.update(iteration=10))


def _state(kind: str, weight: Tensor) -> Tensor:
    """State of a weight after a step; the master weight differs by less than bfloat16 shows."""
    noise = torch.rand(weight.shape)
    return weight.float() * (1 + noise * 2**-10) if kind == "param" else noise + 1
