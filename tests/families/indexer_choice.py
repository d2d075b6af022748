"""Reports which tokens Megatron's own indexer chooses from a release's tensors, in every arrangement of their rows.

A test runs it as a process: `python -m families.indexer_choice ANSWER.json`. One release turns rotary dimensions as
halves (DeepSeek V3.2), the other in pairs (GLM-5). transformers' own indexer says what both ought to choose.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from unittest import mock

import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.transformer_config import MLATransformerConfig
from support.megatron_layers import compute_layers
from torch import Tensor
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

from converters.megatron.parallel import ParallelSizes
from verify.witnesses.megatron.model import connect
from verify.witnesses.megatron.variants.attention import ROTARY_FIRST, LocalBackend

HIDDEN, RANK, HEADS, HEAD_DIM, ROPE, TOP, LENGTH = 96, 48, 6, 32, 8, 8, 64
NAMES = {
    "wq_b.weight": "linear_wq_b.weight",
    "wk.weight": "linear_wk.weight",
    "weights_proj.weight": "linear_weights_proj.weight",
}


def release() -> dict[str, Tensor]:
    """Random tensors of an indexer, by HF name."""
    shapes = {
        "wq_b.weight": (HEADS * HEAD_DIM, RANK),
        "wk.weight": (HEAD_DIM, HIDDEN),
        "weights_proj.weight": (HEADS, HIDDEN),
    }
    return {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()} | {
        "k_norm.weight": 1 + 0.5 * torch.randn(HEAD_DIM),
        "k_norm.bias": 0.5 * torch.randn(HEAD_DIM),
    }


def chosen(indices: Tensor) -> Tensor:
    """Top-k indices [batch, queries, k] as flags [batch, queries, keys], without keys after the query."""
    flags = torch.zeros(*indices.shape[:2], LENGTH, dtype=torch.bool)
    return flags.scatter(-1, indices.long().clamp(min=0), True) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def of_transformers(tensors: Mapping[str, Tensor], hidden: Tensor, queries: Tensor, *, pairs: bool) -> Tensor:
    """What transformers' indexer chooses, turning as halves or in pairs."""
    sizes = {"index_n_heads": HEADS, "index_head_dim": HEAD_DIM, "index_topk": TOP, "qk_rope_head_dim": ROPE}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = DeepseekV32Config(
        hidden_size=HIDDEN, q_lora_rank=RANK, num_attention_heads=4, rope_parameters=rope, **sizes
    )
    indexer = modeling.DeepseekV32Indexer(config, 0).eval()
    indexer.load_state_dict(dict(tensors))
    positions = torch.arange(LENGTH)[None]
    rotary = modeling.DeepseekV32RotaryEmbedding(config)(hidden, positions)
    turn = modeling.apply_rotary_pos_emb_interleave if pairs else modeling.apply_rotary_pos_emb
    with mock.patch.object(modeling, "apply_rotary_pos_emb", turn):
        return chosen(indexer(hidden, queries, rotary, None, positions))


def of_megatron(tensors: Mapping[str, Tensor], hidden: Tensor, queries: Tensor, *, pairs: bool) -> Tensor:
    """What Megatron's indexer chooses; `pairs` is its option, which versions before 0.19 do not have."""
    option = {"dsa_indexer_rope_interleaved": pairs} if ROTARY_FIRST else {}
    sizes = {
        "hidden_size": HIDDEN,
        "q_lora_rank": RANK,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": ROPE,
        "v_head_dim": 16,
    }
    index = {
        "dsa_indexer_n_heads": HEADS,
        "dsa_indexer_head_dim": HEAD_DIM,
        "dsa_indexer_topk": TOP,
        "layernorm_epsilon": 1e-6,
    }
    fixed = {
        "num_layers": 1,
        "num_attention_heads": 4,
        "rope_type": "rope",
        "rotary_base": 10000,
        "experimental_attention_variant": "dsa",
    }
    switches = {
        "add_bias_linear": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": True,
        "perform_initialization": False,
    }
    values = sizes | index | fixed | switches | option
    backend = LocalBackend()
    linear = {name.removesuffix(".weight"): backend.linear() for name in NAMES.values()}
    modules = dsa.DSAIndexerSubmodules(k_norm=backend.layer_norm(rms_norm=False, for_qk=True), **linear)
    indexer = dsa.DSAIndexer(MLATransformerConfig(**values), modules).eval()
    indexer.load_state_dict({NAMES.get(name, name): tensor for name, tensor in tensors.items()})
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    with torch.no_grad():
        return chosen(indexer.forward_with_scores(hidden.transpose(0, 1), queries.transpose(0, 1), mask=mask)[1])


def arranged(tensors: Mapping[str, Tensor], *, paired: bool, last: bool) -> dict[str, Tensor]:
    """Arranges every head's rows with the two rotary halves interleaved, or with the rotary dimensions last."""

    def rows(tensor: Tensor) -> Tensor:
        heads = tensor.reshape(-1, HEAD_DIM, *tensor.shape[1:])
        turned, rest = heads[:, :ROPE], heads[:, ROPE:]
        if paired:
            turned = torch.stack([turned[:, : ROPE // 2], turned[:, ROPE // 2 :]], dim=2).reshape(turned.shape)
        return torch.cat([rest, turned] if last else [turned, rest], dim=1).reshape(tensor.shape)

    return {name: tensor if name == "weights_proj.weight" else rows(tensor) for name, tensor in tensors.items()}


def main() -> None:
    """Counts queries with another choice, for every release, arrangement and option."""
    connect(ParallelSizes(), 0, str(Path(tempfile.mkdtemp()) / "store"))
    compute_layers()
    torch.manual_seed(0)
    tensors, inputs = release(), (torch.randn(2, LENGTH, HIDDEN), torch.randn(2, LENGTH, RANK))
    words, counts = ("halves", "pairs"), {}
    for pairs in (False, True):
        expected = of_transformers(tensors, *inputs, pairs=pairs)
        for (paired, last), option in product(
            product((False, True), repeat=2), (False, True) if ROTARY_FIRST else (True,)
        ):
            found = of_megatron(arranged(tensors, paired=paired, last=last), *inputs, pairs=option)
            rows = (
                " and ".join(word for word, is_so in (("paired", paired), ("rotary last", last)) if is_so)
                or "as released"
            )
            counts[f"{words[pairs]}, {rows}, {words[option]}"] = int((found != expected).any(-1).sum())
    Path(sys.argv[1]).write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
