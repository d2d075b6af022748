"""Saves the weights of a torch_dist checkpoint as Megatron-FSDP does: by torch's DCP, under the names of modules.

Written by hand from megatron-core `transformer/fsdp_dtensor_checkpoint.py`: Megatron-FSDP runs on GPUs only.
"""

import re
import warnings

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save

from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint


def _module_names(name, tensor):
    """A tensor of torch_dist under the names of modules, gate and up apart (`handle_swiglu_in_state_dict`)."""
    name = re.sub(r"experts\.experts\.(\d+)\.(linear_fc\d)\.weight", r"experts.\2.weight\1", name)
    if ".linear_fc1.weight" not in name:
        return {f"module.{name}": tensor}
    gate, up = tensor.chunk(2)
    return {f"module.{name}_w": gate.clone(), f"module.{name}_v": up.clone()}


def save_fsdp(source, root, also=None):
    """Saves what `source` (`release/`) holds into `root`, with moments of every parameter and the stored arguments.

    `also`: more tensors of the model, by names of modules.
    """
    weights = TorchDistCheckpoint(source)
    model = {
        key: one
        for name, tensor in weights.read(list(weights.specs)).items()
        for key, one in _module_names(name, tensor).items()
    }
    model |= also or {}
    moments = {
        f"module.module.{name}": {kind: torch.rand(tensor.shape) + 1 for kind in ("exp_avg", "exp_avg_sq")}
        for name, tensor in model.items()
        if "expert_bias" not in name
    }
    content = {
        "args": torch.load(source / "common.pt", weights_only=False)["args"],
        "checkpoint_version": 3.0,
        "iteration": 5,
        "model": model,
        "optimizer": {"state": moments},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        dcp_save(content, storage_writer=FileSystemWriter(root / "iter_0000005"), no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
