"""Megatron-FSDP's checkpoints (--ckpt-format fsdp_dtensor), whose keys get the names that torch_dist has.

torch's own DCP writes them: tensors are global, whatever ranks held, under the names of the model's modules. Source:
Megatron-LM `training/checkpointing.py` (`preprocess_fsdp_dtensor_state_dict`), megatron-core
`transformer/fsdp_dtensor_checkpoint.py`, and what `tools/checkpoint/checkpoint_inspector.py` writes from torch_dist.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_MODEL = "model.module."
_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(.+)\.([a-z0-9_]+)")
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(linear_fc[12])\.(weight|bias)(\d+)(_[wv])?")
_LOCAL_EXPERT = re.compile(r"(.+\.mlp)\.experts\.local_experts\.(\d+)\.(.+)")
_MTP = re.compile(r"(mtp\.layers\.\d+)\.mtp_model_layer\.(?!layers\.)(.+)")
# What Megatron-LM puts beside the weights, each under a key of its own.
COMMON = ("args", "iteration", "checkpoint_version")


def is_fsdp_dtensor(keys: Collection[str]) -> bool:
    """Whether these are the keys of one, of a model in one piece: pipeline chunks are `model0` and so on."""
    return "args" in keys and any(key.startswith(_MODEL) for key in keys)


def torch_dist_key(key: str) -> str:
    """The key of torch_dist for one of these; another than of weights and their optimizer state stays as it is."""
    if key.startswith(_MODEL):
        return _weight(key.removeprefix(_MODEL))
    if state := _STATE.fullmatch(key):
        return f"optimizer.state.{state[2]}.{_weight(state[1])}"
    return key


def _weight(name: str) -> str:
    if expert := _EXPERT.fullmatch(name):
        return f"{expert[1]}.experts.experts.{expert[4]}.{expert[2]}.{expert[3]}{expert[5] or ''}"
    if expert := _LOCAL_EXPERT.fullmatch(name):
        return f"{expert[1]}.experts.experts.{expert[2]}.{expert[3]}"
    mtp = _MTP.fullmatch(name)
    return f"{mtp[1]}.transformer_layer.{mtp[2]}" if mtp else name
