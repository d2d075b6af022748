"""Makes models of published sizes with fewer layers and random weights: `python models.py NAME PATH [SHARD_BYTES]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ckptkit.converters.planner import expected_hf
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.files import FILE_BYTES
from ckptkit.formats.hf.writer import SafetensorsFiles, cut_shards
from ckptkit.transfer.files import FilesWriter

_COMMON: dict[str, Any] = {
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
}
# Qwen3-30B-A3B with 6 of its 48 layers: 8.7 GB.
MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Qwen3-8B with 16 of its 36 layers: 8.7 GB.
DENSE = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# Qwen3-1.7B's layers, of 0.1 GB each, with a vocabulary of 16384.
_SMALL = DENSE | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "vocab_size": 16384}

_TINY = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 12,
    "vocab_size": 4096,
}


def config_of(name: str) -> dict[str, Any]:
    """`moe`, `moe-LAYERS`, `moe-tiny`, `dense`, or a number of GB for a dense model of about that size."""
    if name == "moe-tiny":
        return MOE | _TINY
    if name.startswith("moe"):
        return MOE | {"num_hidden_layers": int(name.partition("-")[2] or MOE["num_hidden_layers"])}
    if name == "dense":
        return DENSE
    return _SMALL | {"num_hidden_layers": round((float(name) - 0.134) / 0.1007)}


def make(config: dict[str, Any], path: Path, shard: int = FILE_BYTES) -> None:
    """Makes an HF directory of random weights, in the order of a release's files, in shards of this many bytes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config, indent=2))
    specs = {name: TensorSpec(name, shape, "bfloat16") for name, shape in expected_hf(config).items()}
    writer = FilesWriter(path, SafetensorsFiles(specs, cut_shards(specs, shard)))
    # Every tensor is a piece of one pool, from a place of its own: as good as new numbers, and made in seconds.
    generator = torch.Generator().manual_seed(20)
    pool = (torch.randn(1 << 26, generator=generator) * 0.02).to(torch.bfloat16)
    for name, spec in specs.items():
        size = torch.Size(spec.shape).numel()
        start = int(torch.randint(max(1, len(pool) - size), (1,), generator=generator))
        writer.write(
            name,
            (pool if size <= len(pool) else pool.repeat(-(-size // len(pool))))[start : start + size].reshape(
                spec.shape
            ),
        )
    writer.finish()


if __name__ == "__main__":
    make(config_of(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
