"""Faults of public threads about vLLM, planted in checkpoints, each with the sound one that it was made of."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from families import CASES
from families.case import save

from support import engine_models, vllm_formats
from support.quantized import rewrite, write

Edit = Callable[[dict[str, Any]], None]
# Entries of `ignore`; LAYERS stands for the number of layers, which is that of the draft's.
ROUTERS, DRAFT = r"re:.*\.mlp\.gate$", r"re:.*layers\.LAYERS\..*"
ATTENTION = DRAFT + r"self_attn\..*"
MODELS = {**vllm_formats.MODELS, "glm": engine_models.MODELS["glm"]}


def _without(entry):
    def edit(config):
        config["quantization_config"]["ignore"].remove(entry.replace("LAYERS", str(config["num_hidden_layers"])))

    return edit


def _all_in_fp8(config):
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]


@dataclass(frozen=True)
class Thread:
    """A fault: what a sound checkpoint loses, and what its config then says. lab/vllm-versions.md has the threads."""

    model: str
    form: str  # of the sound checkpoint
    lost: str = r"(?!)"
    edit: Edit = lambda config: None


THREADS = {
    "a router built packed and never filled": Thread("moe", "INT4", r".*\.mlp\.gate\.weight", _without(ROUTERS)),
    "a router built packed and given plain": Thread("moe", "INT4", edit=_without(ROUTERS)),
    "a router built in FP8 and never scaled": Thread("moe", "FP8", edit=_all_in_fp8),
    "a draft built as its target is packed": Thread("glm", "INT4 but the draft", edit=_without(DRAFT)),
    "a draft with latent attention built as its target is packed": Thread(
        "mla", "INT4 but the draft", edit=_without(DRAFT)
    ),
    "queries, keys and values of a draft built packed": Thread(
        "glm", "INT4 but the draft's attention", edit=_without(ATTENTION)
    ),
    "a bias of keys that no checkpoint has": Thread("biases", "BF16", r".*\.k_proj\.bias"),
    "biases that the config alone has": Thread("glm", "BF16", edit=lambda config: config.update(attention_bias=True)),
    "biases of a packed layer that no checkpoint has": Thread("biases", "INT4", r".*\.self_attn\.[qkv]_proj\.bias"),
    "scales that are not there": Thread("moe", "FP8", r".*\.weight_scale_inv"),
}
# What stays plain besides, by the end of a form.
_KEPT = {"draft": DRAFT, "attention": ATTENTION}


def sound(thread, root):
    plain, target = root / thread.model, root / f"{thread.model} {thread.form}"
    family, config = MODELS[thread.model]
    if not plain.exists():
        save(family, replace(CASES[family], config=config), plain, torch.bfloat16)
    if thread.form == "BF16":
        return plain
    if target.exists():
        return target
    layers, draft = config().num_hidden_layers, _KEPT.get(thread.form.split()[-1], "")
    entries = [draft.replace("LAYERS", str(layers))] if draft else []
    quantizer, edit = (
        vllm_formats.in_fp8(config()) if thread.form == "FP8" else vllm_formats.in_int4("groups of 32", entries)
    )

    def wanted(name):
        return vllm_formats.is_linear(name) and not any(re.fullmatch(one[3:], name) for one in entries)

    write(plain, target, wanted, quantizer, edit)
    return target


def planted(thread, root, target):
    def left(name, tensor):
        return {} if re.fullmatch(thread.lost, name) else {name: tensor}

    def edit(config):
        thread.edit(config)
        return config

    rewrite(sound(thread, root), target, left, edit)
    return target
