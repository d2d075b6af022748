"""Test models as Hugging Face has their releases: config.json as transformers 4 spells it, which older tools read."""

import json

import torch
from families import CASES
from families.case import save
from families.gqa import as_v4


def release(name, path, case=None):
    save(name, case or CASES[name], path, torch.bfloat16)
    config = json.loads((path / "config.json").read_text())
    if "rope_parameters" in config:
        config = as_v4(config)
    if config["model_type"] in {"qwen2_moe", "qwen3_moe"} and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return path
