"""A small model like Kimi K2, by its tensors and names, for the tests of the online quantizer."""

import torch

from ckptkit.quant.online.quantizer import OnlineQuantizer
from support import models
from support.sglang_runs import int4_config

GROUP = 32
# The ignore list of Kimi K2 Thinking: neither router nor embeddings, which are not Linear layers.
KIMI = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
# What leaves only routed experts packed, beside the default list.
QWEN = (r"re:.*\.self_attn\..*",)
GLM = (*QWEN, r"re:.*\.shared_experts\..*", r"re:.*\.mlp\.(gate|up|gate_up|down)_proj(\.weight)?$")
PROJECTIONS = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
ATTENTION = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")


def config(ignore=KIMI, grid="minmax", **weights):
    content = int4_config(list(ignore), GROUP)
    content["config_groups"]["group_0"]["weights"] |= {"observer_kwargs": {"grid": grid}} | weights
    return {"num_hidden_layers": 2, "quantization_config": content}


def release(prefix="model.", layers=2, experts=3):
    shapes = {f"{prefix}embed_tokens.weight": (96, 128), f"{prefix}norm.weight": (128,), "lm_head.weight": (96, 128)}
    for layer in range(layers):
        here = f"{prefix}layers.{layer}."
        shapes |= {f"{here}self_attn.{name}.weight": (64, 128) for name in ATTENTION} | {
            f"{here}mlp.gate.weight": (experts, 128)
        }
        shapes[f"{here}self_attn.indexer.weights_proj.weight"] = (4, 128)
        for expert in range(experts):
            shapes |= {f"{here}mlp.experts.{expert}.{name}.weight": shape for name, shape in PROJECTIONS.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=generator) / 50).bfloat16() for name, shape in shapes.items()}


def names_of(tensors, packed=lambda name: ".mlp.experts." in name):
    return [
        name + ending for name in tensors for ending in (("_packed", "_scale", "_shape") if packed(name) else ("",))
    ]


def quantizer(**options):
    return OnlineQuantizer(config(), names_of(release()), **options)


def flat(buckets):
    pairs = [pair for bucket in buckets for pair in bucket]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def same(one, other):
    assert models.unequal(one, other) == []
