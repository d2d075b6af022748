"""Faults of public threads about vLLM, planted in checkpoints, each with the sound one that it was made of."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from families import CASES
from families.case import save
from safetensors.torch import load_file, save_file

from support import engine_models, vllm_formats
from support.quantized import compressed_config, fp8_blocks, int4, write

Edit = Callable[[dict[str, Any]], None]
LINEAR = re.compile(r".*layers\.\d+\..*(?<!eh)_proj(_with_mqa)?\.weight")
ROUTERS = r"re:.*\.mlp\.gate$"
DRAFT = r"re:.*layers\.%d\..*"  # of as many layers
ATTENTION = r"self_attn\..*"
ROUTER = re.compile(r".*\.mlp\.gate\.weight")
BIAS_OF_KEYS = re.compile(r".*\.k_proj\.bias")
BIASES = re.compile(r".*\.self_attn\.[qkv]_proj\.bias")
SCALES = re.compile(r".*\.weight_scale_inv")
MODELS = {**vllm_formats.MODELS, "glm": engine_models.MODELS["glm"]}
NOTHING = re.compile(r"(?!)")


@dataclass(frozen=True)
class Thread:
    """A fault: what a sound checkpoint loses, and what its config then says."""

    url: str
    model: str
    form: str  # of the sound checkpoint
    lost: re.Pattern[str] = NOTHING
    edit: Edit = lambda config: None


def _without_routers(config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"].remove(ROUTERS)


def _without_draft(config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"].remove(DRAFT % config["num_hidden_layers"])


def _without_attention(config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"].remove(DRAFT % config["num_hidden_layers"] + ATTENTION)


def _all_in_fp8(config: dict[str, Any]) -> None:
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]


def _with_biases(config: dict[str, Any]) -> None:
    config["attention_bias"] = True


THREADS = {
    "a router built packed and never filled": Thread(
        "https://github.com/vllm-project/vllm-omni/issues/5573", "moe", "INT4", ROUTER, _without_routers
    ),
    "a router built packed and given plain": Thread(
        "https://github.com/vllm-project/vllm-omni/issues/5573", "moe", "INT4", edit=_without_routers
    ),
    "a router built in FP8 and never scaled": Thread(
        "https://github.com/vllm-project/vllm-omni/issues/5573", "moe", "FP8", edit=_all_in_fp8
    ),
    "a draft built as its target is packed": Thread(
        "https://github.com/vllm-project/vllm/pull/37667", "glm", "INT4 but the draft", edit=_without_draft
    ),
    "a draft with latent attention built as its target is packed": Thread(
        "https://github.com/vllm-project/vllm/issues/43304", "mla", "INT4 but the draft", edit=_without_draft
    ),
    "queries, keys and values of a draft built packed": Thread(
        "https://github.com/vllm-project/vllm/pull/37667",
        "glm",
        "INT4 but the draft's attention",
        edit=_without_attention,
    ),
    "a bias of keys that no checkpoint has": Thread(
        "https://github.com/vllm-project/vllm/pull/40160", "biases", "BF16", BIAS_OF_KEYS
    ),
    "biases that the config alone has": Thread(
        "https://github.com/vllm-project/vllm/pull/12342", "glm", "BF16", edit=_with_biases
    ),
    "biases of a packed layer that no checkpoint has": Thread(
        "https://github.com/vllm-project/vllm/pull/12342", "biases", "INT4", BIASES
    ),
    "scales that are not there": Thread("https://github.com/vllm-project/vllm/pull/26889", "moe", "FP8", SCALES),
}


def sound(thread: Thread, root: Path) -> Path:
    """The checkpoint before anything is planted."""
    plain, target = root / thread.model, root / f"{thread.model} {thread.form}"
    family, config = MODELS[thread.model]
    if not plain.exists():
        save(family, replace(CASES[family], config=config), plain, torch.bfloat16)
    if thread.form == "BF16":
        return plain
    if target.exists():
        return target
    layers = config().num_hidden_layers
    packed, draft = thread.form.startswith("INT4"), _kept(thread.form, layers)
    int4_config = compressed_config("pack-quantized", strategy="group", group_size=32)
    fp8_config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(layers))],
    }
    write(
        plain,
        target,
        lambda name: LINEAR.fullmatch(name) is not None and not (draft and re.fullmatch(draft[3:], name)),
        int4(strategy="group", group_size=32) if packed else fp8_blocks(128, 128),
        lambda content: (
            content
            | {
                "quantization_config": int4_config | {"ignore": ["lm_head", ROUTERS, *filter(None, [draft])]}
                if packed
                else fp8_config
            }
        ),
    )
    return target


def _kept(form: str, layers: int) -> str:
    """The entry of `ignore` for what stays plain."""
    return {"draft": DRAFT % layers, "attention": DRAFT % layers + ATTENTION}.get(form.split()[-1], "")


def planted(thread: Thread, root: Path, target: Path) -> Path:
    """A copy of the sound checkpoint with the fault."""
    shutil.copytree(sound(thread, root), target)
    weight_map: dict[str, str] = {}
    for file, content in _shards(target):
        left = {name: tensor for name, tensor in content.items() if not thread.lost.fullmatch(name)}
        save_file(left, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(left, file.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((target / "config.json").read_text())
    thread.edit(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def _shards(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(path.glob("*.safetensors")):
        yield file, load_file(file)
