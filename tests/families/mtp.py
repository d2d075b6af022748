"""GLM-4.5 with its multi-token prediction (MTP) layer.

No modeling code of transformers has MTP layers; the reference here is transformers' decoder layer inside the published equations
(DeepSeek-V3 report, section 2.2): h' = projection of [norm of the next token's embedding, norm of the hidden state], a decoder
layer, a norm, and the model's output layer. The hidden state is the model's after its final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from families import glm4_moe
from families.case import Case, random


def next_tokens(tokens: Tensor) -> Tensor:
    """At each position the next token; Megatron puts token 0 after the last (`roll_tensor`)."""
    return torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)


def rms_norm(tensor: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis."""
    return nn.functional.rms_norm(tensor, weight.shape, weight, eps)


def random_layer(layer: nn.Module, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random values for the tensors of a decoder layer, under the names of a release: one tensor an expert and projection."""
    state = layer.state_dict()
    values = {prefix + name: random(name, tensor, dtype) for name, tensor in state.items() if ".experts." not in name}
    for name, tensor in state.items():
        if name.endswith(".experts.gate_up_proj"):
            stem = prefix + name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensor):
                for kind, half in zip(("gate", "up"), both.chunk(2), strict=True):
                    values[f"{stem}{expert}.{kind}_proj.weight"] = random(name, half, dtype)
        elif name.endswith(".experts.down_proj"):
            stem = prefix + name.removesuffix("down_proj")
            values |= {f"{stem}{expert}.down_proj.weight": random(name, part, dtype) for expert, part in enumerate(tensor)}
    return values


def load_layer(layer: nn.Module, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """Fills a decoder layer from the tensors of a release."""
    state = {}
    for name, tensor in layer.state_dict().items():
        stem, _, leaf = (prefix + name).rpartition(".")
        if ".experts." not in name:
            state[name] = tensors[prefix + name]
        elif leaf == "gate_up_proj":
            one = [torch.cat([tensors[f"{stem}.{expert}.{kind}_proj.weight"] for kind in ("gate", "up")]) for expert in range(len(tensor))]
            state[name] = torch.stack(one)
        else:
            state[name] = torch.stack([tensors[f"{stem}.{expert}.{leaf}.weight"] for expert in range(len(tensor))])
    layer.load_state_dict(state)


def run_layer(model: PreTrainedModel, layer: nn.Module, hidden: Tensor) -> Tensor:
    """A decoder layer of the model on hidden states [batch, sequence, hidden], with the model's rotary embedding, causal."""
    length = hidden.shape[1]
    mask = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)[None, None]
    rotary = model.model.rotary_emb(hidden, position_ids=torch.arange(length)[None])
    output: Tensor = layer.eval()(hidden, attention_mask=mask, position_embeddings=rotary)
    return output


def layer_prefix(model: PreTrainedModel) -> str:
    """Where DeepSeek and GLM put the MTP layer: after the last decoder layer."""
    return f"model.layers.{model.config.num_hidden_layers}."


def added_layer(make: Callable[[Any, int], nn.Module], *, copies: bool = True) -> Callable[[PreTrainedModel, torch.dtype], dict[str, Tensor]]:
    """The tensors of an MTP layer as DeepSeek and GLM ship it, around a decoder layer that `make` makes of config and number."""

    def added(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
        prefix, hidden = layer_prefix(model), model.config.hidden_size
        values = random_layer(make(model.config, model.config.num_hidden_layers), prefix, dtype)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            values[f"{prefix}{name}.weight"] = random(name, torch.empty(hidden), dtype)
        values[prefix + "eh_proj.weight"] = random("eh_proj", torch.empty(hidden, 2 * hidden), dtype)
        if copies:
            values[prefix + "embed_tokens.weight"] = model.model.embed_tokens.weight.detach()
            values[prefix + "shared_head.head.weight"] = model.lm_head.weight.detach()
        return values

    return added


def reference(make: Callable[[Any, int], nn.Module]) -> Callable[[PreTrainedModel, Mapping[str, Tensor], Tensor], Tensor]:
    """Logits of the MTP layer of DeepSeek and GLM by the equations above."""

    def logits(model: PreTrainedModel, added: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        prefix, eps = layer_prefix(model), model.config.rms_norm_eps
        layer = make(model.config, model.config.num_hidden_layers)
        load_layer(layer, prefix, added)
        hidden = rms_norm(model.model(tokens).last_hidden_state, added[prefix + "hnorm.weight"], eps)
        embedded = rms_norm(model.model.embed_tokens(next_tokens(tokens)), added[prefix + "enorm.weight"], eps)
        joined = nn.functional.linear(torch.cat([embedded, hidden], dim=-1), added[prefix + "eh_proj.weight"])
        result = run_layer(model, layer, joined)
        return nn.functional.linear(rms_norm(result, added[prefix + "shared_head.norm.weight"], eps), model.lm_head.weight)

    return logits


CASES = {
    "glm4_moe-mtp": Case(
        glm4_moe.config,
        added=added_layer(Glm4MoeDecoderLayer),
        edit=lambda config: config | {"num_nextn_predict_layers": 1},
        mtp=reference(Glm4MoeDecoderLayer),
        witness="transformers; MTP: its decoder layer in the equations of the DeepSeek-V3 report",
    ),
}
