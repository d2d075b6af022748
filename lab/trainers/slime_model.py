"""Makes what a small run of slime needs, without a download: `python slime_model.py dense|moe OUT`.

OUT/hf is a Qwen3 of 12 layers with random weights (dense with a tied output layer, or with 16 experts and one of its
own) and a tokenizer of bytes; OUT/other differs in its seed alone; OUT/prompts.jsonl has eight prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "eos_token_id": 257,
    "pad_token_id": 256,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


def save(kind: str, path: Path, seed: int) -> None:
    """Writes an HF directory; no two parameters have the same values, norms included."""
    torch.manual_seed(seed)
    dense = kind == "dense"
    config = Qwen3Config(**SIZES, tie_word_embeddings=True) if dense else Qwen3MoeConfig(**SIZES, **EXPERTS)
    model = (Qwen3ForCausalLM if dense else Qwen3MoeForCausalLM)(config).bfloat16()
    for name, parameter in model.named_parameters():
        norm = "norm" in name
        parameter.data = (torch.randn(parameter.shape) * (0.1 if norm else 0.04) + norm).bfloat16()
    model.save_pretrained(path, save_original_format=True)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<eos>"]
    words += [f"<{number}>" for number in range(len(words), VOCABULARY)]  # so that any token can be decoded
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(path)


def main() -> None:
    """Writes everything."""
    kind, out = sys.argv[1], Path(sys.argv[2])
    for name, seed in (("hf", 0), ("other", 1)):
        save(kind, out / name, seed)
    prompts = [{"prompt": f"Count to {number}: 1, 2,", "label": str(number)} for number in range(3, 11)]
    (out / "prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in prompts))


if __name__ == "__main__":
    main()
