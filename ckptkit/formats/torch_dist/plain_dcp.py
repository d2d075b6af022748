"""Distributed checkpoints of torch's own (DCP), which uses the same kind of files as Megatron's torch_dist.

Those of Megatron-LM's FSDP runs are read, and their keys get the names of torch_dist: tensors are global, whatever
ranks held, under the names of the model's modules. There are two: Megatron-FSDP's (`--ckpt-format fsdp_dtensor`) and
torch's FSDP2 (`torch_dcp`), which Megatron-LM saves of runs without tensor, pipeline or expert parallelism alone.
Source: Megatron-LM `training/checkpointing.py` (`generate_state_dict`, `preprocess_fsdp_dtensor_state_dict`) and
`training/arguments.py`, megatron-core `transformer/fsdp_dtensor_checkpoint.py`, and what
`tools/checkpoint/checkpoint_inspector.py` writes from torch_dist.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable
from pathlib import Path
from typing import Literal

from ckptkit.core.errors import UnsupportedError

_OF_MEGATRON = re.compile(r"(?:^|\.)(?:(?:decoder|encoder|mtp)\.layers\.|embedding\.word_embeddings\.|output_layer\.)")
# What Megatron-LM puts into every state dict beside the weights, and a pipeline chunk of a model.
_ARGUMENTS = {"args", "checkpoint_version"}
_CHUNK = re.compile(r"model\d+\.")
_KEEP = "keep this directory: ckptkit has not looked into it"


def refuse_plain_dcp(path: Path, keys: Collection[str], by_torch: bool) -> None:
    """Raises UnsupportedError, naming the format, for a DCP checkpoint that is neither torch_dist nor of FSDP runs.

    `keys` are those of its `.metadata`; `by_torch`: that has torch's notes on nested names. torch_dist without its
    metadata.json and common state passes. Source: Megatron-LM `training/checkpointing.py` (`save_checkpoint`,
    `generate_state_dict`): for `fsdp_dtensor` and `torch_dcp` it calls torch's `save`, which writes neither file.
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


_MODEL = re.compile(r"model\.(module\.)?(.+)")  # the wrapper's name is in Megatron-FSDP's keys alone
_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(.+)\.([a-z0-9_]+)")
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(linear_fc[12])\.(weight|bias)(\d+)(_[wv])?")
_LOCAL_EXPERT = re.compile(r"(.+\.mlp)\.experts\.local_experts\.(\d+)\.(.+)")
_MTP = re.compile(r"(mtp\.layers\.\d+)\.mtp_model_layer\.(?!layers\.)(.+)")
# A norm that the local spec keeps as a module of its own, and torch_dist with the layer after it, as other specs do.
_LOCAL_NORM = re.compile(
    r"(optimizer\.state\.[a-z0-9_]+\.)?(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.)"
    r"(input_layernorm|pre_mlp_layernorm)\.weight"
)
_AFTER = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
# What Megatron-LM puts beside the weights, each under a key of its own.
COMMON = ("args", "iteration", "checkpoint_version")


def fsdp_format(keys: Collection[str]) -> Literal["fsdp_dtensor", "torch_dcp"] | None:
    """Which of the two has these keys, of a model in one piece: pipeline chunks are `model0` and so on."""
    wrappers = {match[1] for key in keys if (match := _MODEL.fullmatch(key))}
    if "args" not in keys or not wrappers:
        return None
    return "torch_dcp" if None in wrappers else "fsdp_dtensor"


def torch_dist_keys(keys: Iterable[str]) -> dict[str, str]:
    """The key of torch_dist for each of these; another than of weights and their optimizer state stays as it is."""
    found = {key: _key(key) for key in keys}
    names = set(found.values())
    return {key: _with_its_layer(name, names) for key, name in found.items()}


def _with_its_layer(name: str, names: Container[str]) -> str:
    if not (norm := _LOCAL_NORM.fullmatch(name)):
        return name
    linear = norm[2] + _AFTER[norm[3]]
    stored = any(f"{linear}.{weight}" in names for weight in ("weight", "weight_w"))
    return f"{norm[1] or ''}{linear}.layer_norm_weight" if stored else name


def _key(key: str) -> str:
    if weight := _MODEL.fullmatch(key):
        return _weight(weight[2])
    if state := _STATE.fullmatch(key):
        return f"optimizer.state.{state[2]}.{_weight(state[1])}"
    return key


def _weight(name: str) -> str:
    if mtp := _MTP.fullmatch(name):
        name = f"{mtp[1]}.transformer_layer.{mtp[2]}"
    if expert := _EXPERT.fullmatch(name):
        return f"{expert[1]}.experts.experts.{expert[4]}.{expert[2]}.{expert[3]}{expert[5] or ''}"
    if expert := _LOCAL_EXPERT.fullmatch(name):
        return f"{expert[1]}.experts.experts.{expert[2]}.{expert[3]}"
    return name
