"""A small model whose weights have the structure that training leaves, made by hand.

What training balances is put there from its reason: rows and columns that answer each other get one random size, those
that do not get sizes of their own. Norms, residual channels and rotary frequencies vary alike in all layers.
"""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MixtralConfig

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN, EXPERTS, VOCAB = 6, 256, 8, 4, 32, 192, 4, 320


def _sizes(count, spread, generator):
    return (spread * torch.randn(count, generator=generator)).exp()


def _attention(layer, turned, channels, random):
    def plain(rows, columns):
        return torch.randn(rows, columns, generator=random) / 16

    pairs = turned * _sizes(GROUPS * HEAD // 2, 0.2, random).reshape(GROUPS, HEAD // 2)
    keys = torch.cat([pairs, pairs], 1)
    asked = keys.repeat_interleave(HEADS // GROUPS, 0)
    values = _sizes(GROUPS * HEAD, 0.3, random).reshape(GROUPS, HEAD)
    yield f"{layer}self_attn.q_proj.weight", plain(HEADS * HEAD, HIDDEN) * asked.reshape(-1, 1) * channels
    yield f"{layer}self_attn.k_proj.weight", plain(GROUPS * HEAD, HIDDEN) * keys.reshape(-1, 1) * channels
    yield f"{layer}self_attn.v_proj.weight", plain(GROUPS * HEAD, HIDDEN) * values.reshape(-1, 1) * channels
    answers = values.repeat_interleave(HEADS // GROUPS, 0).reshape(1, -1)
    yield f"{layer}self_attn.o_proj.weight", plain(HIDDEN, HEADS * HEAD) * answers * channels[:, None]


def _experts(layer, channels, random):
    shared = torch.randn(1, HIDDEN, generator=random)
    router = (shared + torch.randn(EXPERTS, HIDDEN, generator=random)) / 16
    yield f"{layer}block_sparse_moe.gate.weight", router * _sizes(EXPERTS, 0.4, random)[:, None]
    for expert in range(EXPERTS):
        prefix, sizes = f"{layer}block_sparse_moe.experts.{expert}.", _sizes(FFN, 0.3, random)
        gate, up, down = (torch.randn(FFN, HIDDEN, generator=random) / 16 for _ in range(3))
        yield f"{prefix}w1.weight", gate * _sizes(FFN, 0.3, random)[:, None] * channels
        yield f"{prefix}w3.weight", up * sizes[:, None] * channels
        yield f"{prefix}w2.weight", (down * sizes[:, None] * channels).T.contiguous()


def structured():
    random = torch.Generator().manual_seed(0)
    channels, attention, mlp = (_sizes(HIDDEN, spread, random) for spread in (0.2, 0.5, 0.5))
    turned = _sizes(HEAD // 2, 0.5, random)
    found = {"model.norm.weight": _sizes(HIDDEN, 0.2, random)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = torch.randn(VOCAB, HIDDEN, generator=random) * channels
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        found |= dict(_attention(layer, turned, channels, random)) | dict(_experts(layer, channels, random))
        found[f"{layer}input_layernorm.weight"] = attention * _sizes(HIDDEN, 0.1, random)
        found[f"{layer}post_attention_layernorm.weight"] = mlp * _sizes(HIDDEN, 0.1, random)
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def unstructured():
    random = torch.Generator().manual_seed(0)
    return {
        name: tensor if tensor.dim() == 1 else (torch.randn(tensor.shape, generator=random) / 16).bfloat16()
        for name, tensor in structured().items()
    }


def save(tensors, path, *, tokenizer=False):
    path.mkdir(parents=True, exist_ok=True)
    MixtralConfig(
        architectures=["MixtralForCausalLM"],
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    ).save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        letters = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.add_special_tokens(letters[:3])
        made.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path
