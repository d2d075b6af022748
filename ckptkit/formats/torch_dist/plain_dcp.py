"""torch's distributed checkpoints (DCP), which use the same files as Megatron's torch_dist.

Only those of Megatron-LM's FSDP runs are read, with keys renamed to those of torch_dist; tensors are global, with the
names of the model's modules. There are two formats: Megatron-FSDP's (`--ckpt-format fsdp_dtensor`), and torch FSDP2's
(`torch_dcp`), which Megatron-LM saves only without tensor, pipeline and expert parallelism.
Source: Megatron-LM `training/checkpointing.py` (`generate_state_dict`, `preprocess_fsdp_dtensor_state_dict`),
`training/arguments.py` and `tools/checkpoint/checkpoint_inspector.py`, megatron-core
`transformer/fsdp_dtensor_checkpoint.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable
from pathlib import Path
from typing import Literal

from ckptkit.core.errors import UnsupportedError

_OF_MEGATRON = re.compile(r"(?:^|\.)(?:(?:decoder|encoder|mtp)\.layers\.|embedding\.word_embeddings\.|output_layer\.)")
# Keys that Megatron-LM adds to every state dict, and keys of a pipeline chunk of a model.
_ARGUMENTS = {"args", "checkpoint_version"}
_CHUNK = re.compile(r"model\d+\.")
_CHUNKS_HINT = (
    "export it to HF from the program that wrote it (Megatron-Bridge: AutoBridge.save_hf_pretrained): Megatron-LM 0.16 "
    "to 0.19 neither saves nor loads pipeline chunks (--ckpt-format fsdp_dtensor)"
)
_DCP_HINT = (
    "export it to HF safetensors with the trainer that wrote it, or read it with torch "
    "(`python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`)"
)


def refuse_plain_dcp(path: Path, keys: Collection[str], by_torch: bool) -> None:
    """Raises UnsupportedError, naming the format, for a DCP checkpoint that is neither torch_dist nor of FSDP runs.

    `keys`: of its `.metadata`; `by_torch`: whether that has torch's data on nested names. torch_dist without its
    metadata.json and common state is accepted. Source: Megatron-LM `training/checkpointing.py` (`save_checkpoint`,
    `generate_state_dict`): for `fsdp_dtensor` and `torch_dcp` it calls torch's `save`, which writes neither file.
    """
    has_files = (path / "metadata.json").exists() or (path / "common.pt").exists()
    if has_files or any(key.startswith("common_state") for key in keys):
        return
    if not keys or (not by_torch and any(map(_OF_MEGATRON.search, keys))):
        return
    kind, hint = "a checkpoint of torch.distributed.checkpoint (DCP), not of Megatron", _DCP_HINT
    if _ARGUMENTS.issubset(key.partition(".")[0] for key in keys) and any(map(_CHUNK.match, keys)):
        kind, hint = "a checkpoint of Megatron-FSDP in pipeline chunks", _CHUNKS_HINT
    keep = "keep this directory: ckptkit has not checked it"
    raise UnsupportedError(f"{path} is {kind}, which ckptkit does not read", f"{hint}; {keep}")


_MODEL = re.compile(r"model\.(module\.)?(.+)")  # only Megatron-FSDP's keys have the wrapper's name
_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(.+)\.([a-z0-9_]+)")
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(linear_fc[12])\.(weight|bias)(\d+)(_[wv])?")
_LOCAL_EXPERT = re.compile(r"(.+\.mlp)\.experts\.local_experts\.(\d+)\.(.+)")
_MTP = re.compile(r"(mtp\.layers\.\d+)\.mtp_model_layer\.(?!layers\.)(.+)")
# A norm that is a separate module in the local spec, and part of the next layer in torch_dist and other specs.
_LOCAL_NORM = re.compile(
    r"(optimizer\.state\.[a-z0-9_]+\.)?(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.)"
    r"(input_layernorm|pre_mlp_layernorm)\.weight"
)
_AFTER = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
# Keys of Megatron-LM next to the weights.
COMMON = ("args", "iteration", "checkpoint_version")


def fsdp_format(keys: Collection[str]) -> Literal["fsdp_dtensor", "torch_dcp"] | None:
    """The format of these keys, or None for pipeline chunks (`model0` and so on) and other formats."""
    wrappers = {match[1] for key in keys if (match := _MODEL.fullmatch(key))}
    if "args" not in keys or not wrappers:
        return None
    return "torch_dcp" if None in wrappers else "fsdp_dtensor"


def torch_dist_keys(keys: Iterable[str]) -> dict[str, str]:
    """The torch_dist key of each key; only keys of weights and their optimizer state change."""
    found = {key: _key(key) for key in keys}
    names = set(found.values())
    return {key: _fuse_norm(name, names) for key, name in found.items()}


def _fuse_norm(name: str, names: Container[str]) -> str:
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
