"""GLM-4.5 and MiMo with their multi-token prediction (MTP) layers.

No modeling code of transformers has MTP layers. The reference here is transformers' decoder layer inside the published
equations (DeepSeek-V3 report, section 2.2): a projection of [norm of the next token's embedding, norm of the hidden
state], a decoder layer, a norm, and the model's output layer. The hidden state is the model's after its final norm.
MiMo's projection takes its inputs in the other order (the published `MiMoMTPLayers`). SGLang's own class does the same
(tests/converters/test_sglang_mtp.py).
"""

import json
from dataclasses import replace

import torch
from torch import nn
from transformers import Glm4MoeConfig, Qwen2Config
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from families.case import MOE, SIZES, Case, random


def next_tokens(tokens):
    """At each position the next token; Megatron puts token 0 after the last (`roll_tensor`)."""
    return torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)


def rms_norm(tensor, weight, eps):
    return nn.functional.rms_norm(tensor, weight.shape, weight, eps)


def random_layer(layer, prefix, dtype):
    """Random tensors of a decoder layer, named as in a release: one tensor an expert and projection."""
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
            values |= {
                f"{stem}{expert}.down_proj.weight": random(name, part, dtype) for expert, part in enumerate(tensor)
            }
    return values


def load_layer(layer, prefix, tensors):
    """Fills a decoder layer from the tensors of a release."""
    state = {}
    for name, tensor in layer.state_dict().items():
        stem, _, leaf = (prefix + name).rpartition(".")
        if ".experts." not in name:
            state[name] = tensors[prefix + name]
        elif leaf == "gate_up_proj":
            one = [
                torch.cat([tensors[f"{stem}.{expert}.{kind}_proj.weight"] for kind in ("gate", "up")])
                for expert in range(len(tensor))
            ]
            state[name] = torch.stack(one)
        else:
            state[name] = torch.stack([tensors[f"{stem}.{expert}.{leaf}.weight"] for expert in range(len(tensor))])
    layer.load_state_dict(state)


def causal_mask(hidden):
    """For hidden states [batch, sequence, hidden]."""
    length = hidden.shape[1]
    return torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)[None, None]


def run_layer(model, layer, hidden):
    """Runs a causal decoder layer on hidden states [batch, sequence, hidden], with the rotary embedding of `model`."""
    rotary = model.rotary_emb(hidden, position_ids=torch.arange(hidden.shape[1])[None])
    return layer.eval()(hidden, attention_mask=causal_mask(hidden), position_embeddings=rotary)


def layer_prefix(model):
    """Where DeepSeek and GLM put the MTP layer: after the last decoder layer."""
    return f"model.layers.{model.config.num_hidden_layers}."


def added_layer(make, *, copies=True, change=lambda name, value: value):
    """Tensors of an MTP layer as DeepSeek and GLM ship it, around the decoder layer that `make` builds, changed."""

    def added(model, dtype):
        prefix, hidden = layer_prefix(model), model.config.hidden_size
        values = random_layer(make(model.config, model.config.num_hidden_layers), prefix, dtype)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            values[f"{prefix}{name}.weight"] = random(name, torch.empty(hidden), dtype)
        values[prefix + "eh_proj.weight"] = random("eh_proj", torch.empty(hidden, 2 * hidden), dtype)
        if copies:
            values[prefix + "embed_tokens.weight"] = model.model.embed_tokens.weight.detach()
            values[prefix + "shared_head.head.weight"] = model.lm_head.weight.detach()
        return {name: change(name, value) for name, value in values.items()}

    return added


def reference(make):
    """Logits of the MTP layer of DeepSeek and GLM by the equations above."""

    def logits(model, added, tokens):
        prefix, eps = layer_prefix(model), model.config.rms_norm_eps
        layer = make(model.config, model.config.num_hidden_layers)
        load_layer(layer, prefix, added)
        hidden = rms_norm(model.model(tokens).last_hidden_state, added[prefix + "hnorm.weight"], eps)
        embedded = rms_norm(model.model.embed_tokens(next_tokens(tokens)), added[prefix + "enorm.weight"], eps)
        joined = nn.functional.linear(torch.cat([embedded, hidden], dim=-1), added[prefix + "eh_proj.weight"])
        result = run_layer(model.model, layer, joined)
        return nn.functional.linear(
            rms_norm(result, added[prefix + "shared_head.norm.weight"], eps), model.lm_head.weight
        )

    return logits


def mimo_added(count):
    def added(model, dtype):
        values = {}
        hidden = model.config.hidden_size
        for depth in range(count):
            prefix = f"model.mtp_layers.{depth}."
            values |= random_layer(Qwen2DecoderLayer(model.config, 0), prefix, dtype)
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
                values[f"{prefix}{name}.weight"] = random(name, torch.empty(hidden), dtype)
            values[prefix + "input_proj.weight"] = random("input_proj", torch.empty(hidden, 2 * hidden), dtype)
        return values

    return added


def mimo_reference(model, added, tokens):
    """Logits of MiMo's MTP layers: each takes the hidden states of the one before, and tokens one further on."""
    hidden, eps = model.model(tokens).last_hidden_state, model.config.rms_norm_eps
    found = []
    while (prefix := f"model.mtp_layers.{len(found)}.") + "input_proj.weight" in added:
        layer = Qwen2DecoderLayer(model.config, 0)
        load_layer(layer, prefix, added)
        tokens = next_tokens(tokens)
        embedded = rms_norm(model.model.embed_tokens(tokens), added[prefix + "token_layernorm.weight"], eps)
        before = rms_norm(hidden, added[prefix + "hidden_layernorm.weight"], eps)
        joined = nn.functional.linear(torch.cat([before, embedded], dim=-1), added[prefix + "input_proj.weight"])
        hidden = rms_norm(run_layer(model.model, layer, joined), added[prefix + "final_layernorm.weight"], eps)
        found.append(nn.functional.linear(hidden, model.lm_head.weight))
    return torch.cat(found)


def mimo(layers, *, tied):
    """MiMo with this many MTP layers; the release has one, and its own embeddings for the output."""
    return Case(
        lambda: Qwen2Config(
            **SIZES, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 640000.0}
        ),
        added=mimo_added(layers),
        edit=lambda config: (
            config
            | {
                "model_type": "mimo",
                "architectures": ["MiMoForCausalLM"],
                "num_nextn_predict_layers": layers,
                "attention_bias": True,
                "use_mrope": False,
            }
        ),
        mtp=mimo_reference,
        witness="transformers' qwen2; "
        "MTP: its decoder layer in the equations of the published modeling code, and SGLang's own class",
    )


def small(case, layers):
    """The same model with fewer decoder layers, where their number does not matter."""

    def config():
        whole = case.config()
        text = getattr(whole, "text_config", whole)
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        return whole

    return replace(case, config=config)


def with_tensors(case, wanted):
    """The same model, of whose added tensors only these are there."""
    return replace(
        case,
        added=lambda model, dtype: {name: tensor for name, tensor in case.added(model, dtype).items() if wanted(name)},
    )


def promising(path, layers):
    """The same directory, its config.json now promising so many MTP layers."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": layers}))
    return path


def glm4_moe():
    return Glm4MoeConfig(
        **SIZES,
        **MOE,
        n_routed_experts=12,
        n_shared_experts=1,
        first_k_dense_replace=2,
        use_qk_norm=True,
        attention_bias=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,  # newer transformers would promise one
    )


CASES = {
    "glm4_moe": Case(glm4_moe, fused=True),
    "mimo": mimo(1, tied=False),
    "mimo-tied-two-layers": small(mimo(2, tied=True), 4),
    "glm4_moe-mtp": Case(
        glm4_moe,
        added=added_layer(Glm4MoeDecoderLayer),
        edit=lambda config: config | {"num_nextn_predict_layers": 1},
        mtp=reference(Glm4MoeDecoderLayer),
        witness="transformers; "
        "MTP: its decoder layer in the equations of the DeepSeek-V3 report, and SGLang's own class",
        fused=True,
    ),
}
