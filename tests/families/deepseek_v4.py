"""DeepSeek-V4 as it is released: under DeepSeek's own names, of which transformers' class saves none but the head's."""

import re

import torch
from transformers import DeepseekV4Config

from families.case import SIZES, Case, random

# transformers' names in a layer, with those of the release.
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    **{f"{half}_hc.{part}": f"hc_{half}_{part}" for half in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
}
OUTSIDE = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
    "head.weight": "head.weight",
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(w[123])\.weight")
FP32 = ("_hc.fn", "_hc.base", "_hc.scale", "hc_fn", "hc_base", "hc_scale", "position_bias", "sinks")
RATIOS = [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128]


def released(name):
    """The release's name of a tensor, by the one that transformers saves."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, inside = name.split(".", 3)
    if expert := _EXPERT.fullmatch(inside):
        return f"layers.{layer}.ffn.experts.{expert[1]}.{expert[2]}.weight"
    return f"layers.{layer}.{LAYER[inside]}"


def under_release_names(tensors):
    """All tensors as the release has them: biases in float32, which transformers' class keeps in the model's dtype."""
    return {
        released(name): 6.9 + 0.1 * torch.randn(tensor.shape) if name.endswith("correction_bias") else tensor
        for name, tensor in tensors.items()
    }


def value(name, tensor, dtype):
    """Float32 state, and tables that send a token to different experts."""
    if name.endswith("tid2eid"):
        return torch.rand(len(tensor), 12).argsort(dim=1)[:, : tensor.shape[1]]
    return random(name, tensor, torch.float32 if name.endswith(FP32) else dtype)


def draft_layer(model, dtype):
    """The multi-token prediction layer: as layer 1, whose experts no table chooses, between modules of its own."""
    hidden, ffn, streams = model.config.hidden_size, model.config.moe_intermediate_size, model.config.hc_mult
    like = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("model.layers.1.")}
    layer = {name.split(".", 3)[3]: value(name, tensor, tensor.dtype) for name, tensor in like.items()}
    found = {LAYER[name]: tensor for name, tensor in layer.items() if name in LAYER and "tid2eid" not in name}
    for expert in range(model.config.n_routed_experts):
        for part in ("w1", "w3"):
            found[f"ffn.experts.{expert}.{part}.weight"] = random("", torch.empty(ffn, hidden), dtype)
        found[f"ffn.experts.{expert}.w2.weight"] = random("", torch.empty(hidden, ffn), dtype)
    found["ffn.gate.bias"] = 6.9 + 0.1 * torch.randn(model.config.n_routed_experts)
    found |= {f"{name}.weight": random("norm", torch.empty(hidden), dtype) for name in ("enorm", "hnorm", "norm")}
    found |= {f"{name}.weight": random("", torch.empty(hidden, hidden), dtype) for name in ("e_proj", "h_proj")}
    shapes = {"fn": (streams, streams * hidden), "base": (streams,), "scale": (1,)}
    found |= {f"hc_head_{name}": random("", torch.empty(shape), torch.float32) for name, shape in shapes.items()}
    return {f"mtp.0.{name}": tensor for name, tensor in found.items()}


def as_released(config):
    """config.json under the keys of the release, with none that transformers alone writes."""
    rope = config["rope_parameters"]["compress"]
    ours = ("compress_rates", "layer_types", "mlp_layer_types", "mlp_bias", "partial_rotary_factor", "rope_parameters")
    kept = {key: content for key, content in config.items() if key not in ours}
    keys = ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings", "type")
    return kept | {
        "compress_ratios": [*RATIOS, 0],
        "num_hash_layers": 3,
        "num_nextn_predict_layers": 1,
        "qk_rope_head_dim": 64,
        "rope_scaling": {key: rope[key] for key in keys},
        "rope_theta": config["rope_parameters"]["main"]["rope_theta"],
        "topk_method": "noaux_tc",
    }


def config():
    """Twelve layers, three with a table, of every kind of attention; heads are as large as vLLM's kernels want them."""
    return DeepseekV4Config(
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"}
        | {"num_key_value_heads": 1, "head_dim": 512},
        moe_intermediate_size=96,
        num_experts_per_tok=3,
        n_routed_experts=12,
        n_shared_experts=1,
        q_lora_rank=40,
        o_groups=5,
        o_lora_rank=24,
        index_n_heads=6,
        index_head_dim=128,
        index_topk=7,
        qk_rope_head_dim=64,
        sliding_window=9,
        compress_ratios=RATIOS,
        num_hash_layers=3,
        hc_mult=4,
        num_nextn_predict_layers=0,
        rope_scaling={
            "type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
    )


CASES = {"deepseek_v4": Case(config, added=draft_layer, edit=as_released, value=value, whole=under_release_names)}
