"""`ckptkit quantize` of a whole checkpoint against `cat` of its files to /dev/null: how near it is to the speed of reading."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import Run, forget, remember, run

from ckptkit.safetensors_io import SafetensorsWriter, cut_shards
from ckptkit.specs import TensorSpec

ROUNDS = 3
# Qwen3-30B-A3B (its published sizes) with 6 of its 48 layers: 8.7 GB.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def rows() -> list[dict[str, Any]]:
    """Seconds, throughput and memory of both, on files that are not in the page cache ("cold") and that are ("warm")."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        source, target = Path(directory, "hf"), Path(directory, "int4")
        make(source)
        files = sorted(source.glob("*.safetensors"))
        commands = {
            "cat to /dev/null": ["cat", *map(str, files)],
            "quantize": [sys.executable, "-m", "ckptkit", "quantize", str(source), str(target), "--group-size", "128"],
        }
        runs: dict[tuple[str, str], list[Run]] = {}
        for _ in range(ROUNDS):
            for state, prepare in (("cold", forget), ("warm", remember)):
                for what, command in commands.items():
                    prepare(files)
                    runs.setdefault((what, state), []).append(run(command, target))
        size = sum(file.stat().st_size for file in files)
    return [_row(what, state, found, runs["cat to /dev/null", state], size) for (what, state), found in runs.items()]


def _row(what: str, state: str, runs: list[Run], reading: list[Run], size: int) -> dict[str, Any]:
    seconds, floor = (statistics.median(one.seconds for one in found) for found in (runs, reading))
    return {
        "what": what,
        "page cache": state,
        "seconds": round(seconds, 2),
        "ratio to cat": round(seconds / floor, 2),
        "GB/s read": round(size / seconds / 1e9, 2),
        "peak MiB": max(one.resident for one in runs) >> 20,
        "anonymous MiB": max(one.anonymous for one in runs) >> 20,
    }


def make(path: Path) -> None:
    """An HF directory of random weights in the sizes of CONFIG, written a tensor at a time."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2))
    specs = {name: TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes().items()}
    writer = SafetensorsWriter(path, specs, cut_shards(specs))
    generator = torch.Generator().manual_seed(20)
    # Every tensor is a piece of one pool, from a place of its own: as good to quantize as new numbers, and made in seconds.
    pool = (torch.randn(1 << 26, generator=generator) * 0.02).to(torch.bfloat16)
    for name, spec in specs.items():
        size = torch.Size(spec.shape).numel()
        start = int(torch.randint(max(1, len(pool) - size), (1,), generator=generator))
        writer.write(name, (pool if size <= len(pool) else pool.repeat(-(-size // len(pool))))[start : start + size].reshape(spec.shape))
    writer.finish()


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name, in the order of a release's files."""
    hidden, heads, groups, wide = CONFIG["hidden_size"], CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.{part}_proj.weight": (count * wide, hidden) for part, count in (("q", heads), ("k", groups), ("v", groups))}
        found |= {f"{at}self_attn.o_proj.weight": (hidden, heads * wide), f"{at}self_attn.q_norm.weight": (wide,), f"{at}self_attn.k_norm.weight": (wide,)}
        found |= {f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,)}
        found[f"{at}mlp.gate.weight"] = (CONFIG["num_experts"], hidden)
        for expert in range(CONFIG["num_experts"]):
            for part, shape in (("gate", (768, 2048)), ("up", (768, 2048)), ("down", (2048, 768))):
                found[f"{at}mlp.experts.{expert}.{part}_proj.weight"] = shape
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (CONFIG["vocab_size"], hidden)}
