"""EAGLE draft models with random weights, as trainers save them, for a target of hidden size 128 and 352 tokens."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, TOKENS, DRAFTED = 128, 352, 64
# By who saves them so: config.json, what the first layer is called, and which other tensors there are.
KINDS = {
    name: (kind["config"], kind["layer"], tuple(kind["parts"]))
    for name, kind in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}


def tensors_of(kind):
    config, first, parts = KINDS[kind]
    torch.manual_seed(3)
    hidden, drafted = config.get("hidden_size", HIDDEN), config.get("draft_vocab_size", TOKENS)
    eagle3 = "Eagle3" in config["architectures"][0]
    width = 2 * hidden if eagle3 else hidden
    shapes = {
        f"{first}self_attn.q_proj.weight": (64, width),
        f"{first}self_attn.k_proj.weight": (32, width),
        f"{first}self_attn.v_proj.weight": (32, width),
        f"{first}self_attn.o_proj.weight": (hidden, 64),
        f"{first}mlp.gate_proj.weight": (80, hidden),
        f"{first}mlp.up_proj.weight": (80, hidden),
        f"{first}mlp.down_proj.weight": (hidden, 80),
        f"{first}post_attention_layernorm.weight": (hidden,),
        "fc.weight": (hidden, 384 if eagle3 else 256),
    }
    if eagle3:
        norms = (f"{first}input_layernorm.weight", f"{first}hidden_norm.weight", "norm.weight")
        shapes |= dict.fromkeys(norms, (hidden,))
    shapes |= {"lm_head.weight": (drafted, hidden)} if "lm_head" in parts else {}
    shapes |= {"embed_tokens.weight": (TOKENS, hidden)} if "embed" in parts else {}
    shapes |= {"fc.bias": (hidden,)} if "fc.bias" in parts else {}
    shapes |= {f"fc_norm.{at}.weight": (128,) for at in range(3)} if "fc_norm" in parts else {}
    shapes |= {f"{first}self_attn.{one}_norm.weight": (16,) for one in "qk"} if "qk" in parts else {}
    if "qkv.bias" in parts:
        shapes |= {f"{first}self_attn.{one}_proj.bias": (64 if one == "q" else 32,) for one in "qkv"}
    if "latent" in parts:
        shapes = {name: shape for name, shape in shapes.items() if "self_attn." not in name} | {
            f"{first}self_attn.q_a_proj.weight": (48, 256),
            f"{first}self_attn.q_a_layernorm.weight": (48,),
            f"{first}self_attn.q_b_proj.weight": (96, 48),
            f"{first}self_attn.kv_a_proj_with_mqa.weight": (40, 256),
            f"{first}self_attn.kv_a_layernorm.weight": (32,),
            f"{first}self_attn.kv_b_proj.weight": (160, 32),
            f"{first}self_attn.o_proj.weight": (128, 96),
        }
    found = {name: torch.randn(shape).mul(0.05).bfloat16() for name, shape in shapes.items()}
    chosen = torch.randperm(TOKENS)[:DRAFTED].sort().values
    if "d2t" in parts:
        found["d2t"] = chosen - torch.arange(DRAFTED)
    if "t2d" in parts:
        found["t2d"] = torch.zeros(TOKENS, dtype=torch.bool)
        found["t2d"][chosen] = True
    return found


def save_draft(path, tensors, config):
    path.mkdir(parents=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def made_draft(kind, path):
    return save_draft(path, tensors_of(kind), KINDS[kind][0])
