"""LoRA adapters that PEFT itself makes and saves, for test models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from families import HF_CASES, case
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3-untied", {"target_modules": [*ATTENTION, *MLP]}),
    "patterns": (
        "qwen3-untied",
        {
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"down_proj": 6},
            "alpha_pattern": {r".*\.layers.3.self_attn.q_proj": 32, "down_proj": 9},
        },
    ),
    "rslora": ("qwen3-untied", {"target_modules": ATTENTION, "use_rslora": True}),
    "dora": ("qwen3-untied", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "saved": ("qwen3-untied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "embedding": ("qwen3-untied", {"target_modules": ["embed_tokens", "o_proj"]}),
    "fused experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "all linear": ("qwen3_moe", {"target_modules": "all-linear"}),
    "mtp": ("glm4_moe-mtp", {"target_modules": ["q_proj", "o_proj"]}),
    "other names": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "nested": ("gemma3", {"target_modules": r".*language_model.*\.(q_proj|down_proj)"}),
}


def randomized(model: nn.Module) -> None:
    """B begins as zeros, which would merge to nothing."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.requires_grad:
            size = 1.1 if "magnitude" in name else 0.05
            parameter.data = parameter.data * size if "magnitude" in name else torch.randn_like(parameter) * size
        elif "modules_to_save.default" in name:
            parameter.data += 0.1


def made(kind: str, path: Path) -> None:
    """`base`, an `adapter` for it as PEFT saves it, and what PEFT merges, saved by transformers as `merged`."""
    name, options = KINDS[kind]
    case.save(name, HF_CASES[name], path / "base", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options))
    randomized(tuned)
    tuned.save_pretrained(str(path / "adapter"))
    again = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.float32)
    whole = PeftModel.from_pretrained(again, str(path / "adapter")).merge_and_unload()
    whole.save_pretrained(path / "merged", max_shard_size="100GB")
