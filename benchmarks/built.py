"""Converts as it is commonly done, through a built model in memory: `built.py to-megatron|to-hf SOURCE TARGET [HF]`.

to-megatron: transformers loads the release, megatron-core builds the model, weights are copied over, and
`dist_checkpointing.save` writes it.
to-hf: torch.distributed.checkpoint loads all keys of the checkpoint into memory, `save_file` writes shards of 5 GB.
Both use the rules of ckptkit's families for names and layouts, so that only the way of moving the bytes differs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptkit.converters.planner import dims_of, rules_of, to_hf, to_megatron
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.writer import cut_shards
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint


class InMemory:
    """Tensors that are all there, as a Checkpoint."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config, self._tensors = config, tensors
        self.specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
        self.groups = [(name,) for name in tensors]

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in names}


def to_megatron_built(source: Path, target: Path) -> None:
    """HF -> torch_dist, the release and the built model in memory."""
    import json

    from megatron.core import dist_checkpointing, parallel_state
    from transformers import AutoModelForCausalLM

    from ckptkit.converters.megatron.module_names import global_name
    from ckptkit.converters.megatron.parallel import ParallelSizes
    from ckptkit.verify.witnesses.megatron.model import MegatronBuild, build_chunks, connect
    from ckptkit.verify.witnesses.megatron.process import held_by, layers_of_chunk

    config = json.loads((source / "config.json").read_text())
    release = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    view = to_megatron(InMemory(config, release.state_dict()), str(source))
    with tempfile.TemporaryDirectory() as folder:
        connect(ParallelSizes(), 0, f"{folder}/store")
        dims = dims_of(config)
        (model,) = build_chunks(dims, MegatronBuild(ParallelSizes(), torch.bfloat16))
        rules = {rule.megatron: rule for rule in rules_of(config)}
        for local, held in held_by(model).items():
            name = global_name(local, layers_of_chunk(model), range(dims.experts), rules)
            whole = view.read([name])[name]
            held[: whole.shape[0]].copy_(whole)
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        (target / "iter_0000000").mkdir(parents=True)
        dist_checkpointing.save(
            model.sharded_state_dict(metadata=metadata), str(target / "iter_0000000"), content_metadata={}
        )
        torch.distributed.destroy_process_group()


def to_hf_loaded(source: Path, target: Path, hf: Path) -> None:
    """torch_dist -> HF, all of the checkpoint in memory."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(source)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    checkpoint = TorchDistCheckpoint(source, hf=hf)
    tensors = {name: state[parts[0].stored.key][parts[0].index] for name, parts in checkpoint._logical.items()}
    view = to_hf(InMemory(checkpoint.config, tensors), str(source))
    target.mkdir()
    for file, names in cut_shards(view.specs).items():
        save_file({name: tensor.contiguous() for name, tensor in view.read(names).items()}, target / file)


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    (to_megatron_built if verb == "to-megatron" else to_hf_loaded)(*map(Path, paths))
