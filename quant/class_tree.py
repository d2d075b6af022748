"""Which modules of a model are Linear layers: asked of transformers, because names alone cannot tell a Linear from a router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ckptkit.errors import CkptkitError

_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class ClassTree:
    """Module names of a model, with one name an expert and projection, as checkpoints spell them.

    `linears`: every nn.Linear. Of these, `head` is the output embedding and `gates` stand directly beside the routed experts:
    they choose or weigh experts, and no INT4 reader packs either. `others`: modules of another class whose `weight` has two or
    more axes, with that class. `draft_layers`: numbers of the multi-token prediction layers, for which transformers has no classes.
    """

    linears: frozenset[str]
    head: str
    gates: frozenset[str]
    others: Mapping[str, str]
    draft_layers: range

    @cached_property
    def packable(self) -> frozenset[str]:
        """Modules that may be INT4."""
        return self.linears - self.gates - {self.head}

    def reason_to_keep(self, module: str) -> str | None:
        """Why this module is never INT4; None when it may be."""
        if module in self.others:
            return f"{self.others[module]} is no Linear"
        if module == self.head:
            return "output embedding"
        if module in self.gates:
            return "beside the experts: a router or a gate"
        if self.in_draft_layer(module) is not None:
            return "draft layer"
        return None if module in self.linears else "no module of the model"

    def in_draft_layer(self, module: str) -> tuple[int, str] | None:
        """The layer number and the rest of the name of a module in a draft layer, else None."""
        for layer in self.draft_layers:
            if module.startswith(prefix := f"model.layers.{layer}."):
                return layer, module.removeprefix(prefix)
        return None


def class_tree(config: Mapping[str, Any]) -> ClassTree:
    """Builds the model that an HF config describes on the meta device, without weights, and sorts its modules.

    Raises CkptkitError when transformers does not know the model or refuses the config.
    """
    model = _meta_model(config)
    modules = dict(model.named_modules())
    head = next((name for name, module in modules.items() if module is model.get_output_embeddings()), "")
    experts = {name: module for name, module in modules.items() if _is_fused_experts(module)}
    blocks = {name.rpartition(".")[0] for name in experts}
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    others = {
        name: type(module).__name__
        for name, module in modules.items()
        if name not in linears and isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.ndim >= 2
    }
    gates = frozenset(name for name in linears if name.rpartition(".")[0] in blocks)
    linears |= {name for prefix, module in experts.items() for name in _expert_linears(prefix, module)}
    layers = int(config.get("num_hidden_layers") or 0)
    return ClassTree(frozenset(linears), head, gates, others, range(layers, layers + int(config.get("num_nextn_predict_layers") or 0)))


def _meta_model(config: Mapping[str, Any]) -> PreTrainedModel:
    # Without these keys transformers would ask for remote code, or for a quantizer.
    fields = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "quantization_config")}
    try:
        parsed = AutoConfig.for_model(config.get("model_type"), **fields)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(parsed)
    except (ValueError, TypeError, LookupError, ArithmeticError, StrictDataclassError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise CkptkitError(
            f"transformers cannot build model_type {config.get('model_type')!r} from config.json: {reason}",
            "which tensors are Linear layers is read from the model's classes; update transformers, or repair config.json",
        ) from error


def _is_fused_experts(module: nn.Module) -> bool:
    parameters = [getattr(module, name, None) for name in _FUSED_EXPERTS]
    return all(isinstance(parameter, torch.Tensor) and parameter.ndim == 3 for parameter in parameters)


def _expert_linears(prefix: str, module: nn.Module) -> Iterator[str]:
    for fused, projections in _FUSED_EXPERTS.items():
        for expert in range(getattr(module, fused).shape[0]):
            for projection in projections:
                yield f"{prefix}.{expert}.{projection}"
