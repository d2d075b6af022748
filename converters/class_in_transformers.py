"""Builds transformers' own class of a model on the meta device: no weights, no network, no code of the checkpoint.

`python -m ckptkit.converters.class_in_transformers PARENT CONFIG.json REPORT.json` writes a description of the class
for `ckptkit.converters.by_class`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from types import ModuleType
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations import hub_kernels
from transformers.models.auto import modeling_auto

from ckptkit.converters.by_class import SIZES
from ckptkit.core.errors import words_of
from ckptkit.core.isolation import end_with_parent

_OFFLINE = Lock()
_KERNELS = ("causal-conv1d", "falcon_mamba-ssm", "mamba-ssm")
_ROUTERS = ("router", "gating", "topk")  # in the name of a class that chooses experts
# Flags of transformers' `use_experts_implementation` for experts in the usual layout.
_USUAL = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_gate": True}


@contextmanager
def hub_offline() -> Iterator[None]:
    """Blocks requests to the Hugging Face hub. The switch is global to the process, so builds take turns.

    Mixers of some classes request kernels from the hub; an empty module replaces each of them meanwhile.
    """
    with _OFFLINE:
        before, kernels = constants.HF_HUB_OFFLINE, dict(hub_kernels._KERNEL_MODULE_MAPPING)
        constants.HF_HUB_OFFLINE = True
        hub_kernels._KERNEL_MODULE_MAPPING.update({name: ModuleType(name) for name in _KERNELS})
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
            hub_kernels._KERNEL_MODULE_MAPPING.clear()
            hub_kernels._KERNEL_MODULE_MAPPING.update(kernels)


def config_for(content: Mapping[str, Any]) -> Any | None:
    """transformers' config of a config.json, without keys that name code, or None if it has no class for it."""
    if content.get("model_type") not in transformers.CONFIG_MAPPING:
        return None
    with TemporaryDirectory(prefix="ckptkit-config-") as home:
        (Path(home) / "config.json").write_text(json.dumps(_without_code(content)))
        return transformers.AutoConfig.from_pretrained(home, trust_remote_code=False)


def _without_code(config: Any) -> Any:
    """Removes keys that name code: classes of a repository, or implementations from the hub."""
    if isinstance(config, list):
        return [_without_code(one) for one in config]
    if not isinstance(config, dict):
        return config
    return {
        key: _without_code(value)
        for key, value in config.items()
        if key != "auto_map" and not key.endswith("implementation")
    }


def class_for(config: Any) -> Any | None:
    """transformers' class for the first entry of `architectures`, or its language model class, or None."""
    if not config.architectures:
        classes = (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING)
        return next((known[type(config)] for known in classes if type(config) in known), None)
    model_class = getattr(transformers, str(config.architectures[0]), None)
    return model_class if is_model(model_class) else None


def is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedModel)


def build(content: Mapping[str, Any]) -> Any | None:
    """The model of a config.json on the meta device, or None without a class. Raises any error of transformers."""
    config = config_for(content)
    model_class = None if config is None else class_for(config)
    if model_class is None:
        return None
    with hub_offline(), torch.device("meta"):
        return model_class._from_config(config, attn_implementation="eager", experts_implementation="eager")


def describe(model: Any) -> dict[str, Any]:
    """Describes the class of a model with the fields of `ckptkit.converters.by_class.Built`.

    Raises ValueError for tensors that transformers merges with tensors of other modules on saving.
    """
    text = model.config.get_text_config(decoder=True)
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    decoder, head = names.get(id(model.get_decoder()), ""), model.get_output_embeddings()
    state = model.state_dict()
    plain = revert_weight_conversion(model, dict(state))
    saved = _saved(model, state, plain)
    tied = {one: source for one, source in model.all_tied_weights_keys.items() if one != source}
    lm_head = "" if head is None else f"{names[id(head)]}.weight"
    begin = f"{decoder}." if decoder else ""
    tensors = [
        {
            "name": name,
            "own": own,
            "shape": shape,
            "kind": _kind(modules, own, name),
            "is_linear": _is_linear(modules[own.rpartition(".")[0]], own, name),
            "module_class": type(modules[own.rpartition(".")[0]]).__name__,
            "outside": not own.startswith(begin) and own != lm_head,
        }
        for own, outputs in saved.items()
        if own not in tied
        for name, shape in outputs.items()
    ]
    return {
        "model_class": type(model).__name__,
        "head": next(iter(saved.get(lm_head, {})), ""),
        "tensors": tensors,
        "tied": {name: next(iter(saved[source])) for one, source in tied.items() for name in saved[one]},
        "joins_experts": any(name not in plain for names in saved.values() for name in names),
        "zero_norms": any(_starts_at_zero(model, one) for name, one in modules.items() if name.startswith(begin)),
        "sizes": {key: size for key in SIZES if type(size := getattr(text, key, None)) is int},
    }


def _saved(
    model: Any, tensors: Mapping[str, Any], everything: Mapping[str, Any]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The saved names and shapes of each tensor of the class; `everything`: all saved tensors.

    Raises ValueError if transformers merges tensors of several modules.
    """
    plain = {id(tensor): name for name, tensor in everything.items()}
    shapes = {own: {plain[id(one)]: tuple(one.shape)} for own, one in tensors.items() if id(one) in plain}
    for own, one in tensors.items():
        if own in shapes:
            continue
        converted = revert_weight_conversion(model, {own: one})
        if not converted.keys() <= everything.keys():
            raise ValueError(f"{own} is saved merged with other tensors, as {', '.join(sorted(converted))}")
        shapes[own] = {name: tuple(part.shape) for name, part in converted.items()}
    modules = dict(model.named_modules())
    return {own: dict(_split_experts(modules[own.rpartition(".")[0]], shapes[own])) for own in tensors}


def _split_experts(module: nn.Module, saved: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of saved tensors; fused experts in the usual layout become one tensor per expert.

    The usual layout is [experts, rows, columns], with gate rows above up rows (`ckptkit.converters.experts`).
    """
    flags = {key: getattr(module, key, None) for key in _USUAL}
    for name, shape in saved.items():
        block, _, leaf = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
        if not parts or len(shape) != 3 or flags != _USUAL:
            yield name, shape
            continue
        for expert in range(shape[0]):
            yield from ((f"{block}.{expert}.{one}.weight", (shape[1] // len(parts), shape[2])) for one in parts)


def _is_linear(module: nn.Module, own: str, saved: str) -> bool:
    """Whether a saved tensor is the weight of a Linear layer, or of one expert in a fused tensor."""
    leaf = own.rpartition(".")[2]
    single = leaf != "weight" and saved.endswith(".weight") and getattr(module, leaf).ndim == 3
    return single or (isinstance(module, nn.Linear) and leaf == "weight")


def _kind(modules: Mapping[str, nn.Module], own: str, saved: str) -> str:
    """The `kind` of a saved tensor's module in `ckptkit.converters.rules.ParamMapping`, or the module's class."""
    name = own.rpartition(".")[0]
    module, parent, leaf = modules[name], *name.rpartition(".")[::2]
    names = type(module).__name__.lower(), type(modules[parent]).__name__.lower()
    is_gate = isinstance(module, nn.Linear) and not leaf.endswith("_proj") and _has_experts(modules[parent])
    if is_gate or any(word in one for word in _ROUTERS for one in names):
        return "Router"
    if _is_linear(module, own, saved):
        return "Linear"
    return "Embedding" if isinstance(module, nn.Embedding) else type(module).__name__


def _has_experts(block: nn.Module) -> bool:
    """Whether a block has a list of experts, or a parameter with three axes outside a convolution (stacked experts)."""
    named = dict(block.named_children())
    modules = (module for module in named.values() if not isinstance(module, nn.modules.conv._ConvNd))
    stacked = any(one.ndim == 3 for module in modules for one in module.parameters(recurse=False))
    return stacked or isinstance(named.get("experts"), nn.ModuleList)


def _starts_at_zero(model: Any, module: nn.Module) -> bool:
    """Whether the class initializes a norm with zeros, because it adds one to the stored weight."""
    weight = getattr(module, "weight", None)
    if "norm" not in type(module).__name__.lower() or not isinstance(weight, nn.Parameter):
        return False
    module.weight = nn.Parameter(torch.full(weight.shape, 7.0))
    model._init_weights(module)
    return not bool(module.weight.any())


def main() -> None:
    """Writes the description of a config's class, or the error of transformers."""
    end_with_parent(int(sys.argv[1]))
    transformers.logging.set_verbosity_error()
    try:
        model = build(json.loads(Path(sys.argv[2]).read_text()))
    except (ImportError, MemoryError, NotImplementedError):  # say nothing about the config
        raise
    except Exception as error:  # noqa: BLE001 - a class's own error about its config is the answer
        description = {"refused": words_of(error)[:300]}
    else:
        description = {} if model is None else describe(model)  # an error here says nothing about the config
    report = Path(sys.argv[3])
    report.with_suffix(".partial").write_text(json.dumps(description))
    report.with_suffix(".partial").rename(report)


if __name__ == "__main__":
    main()
