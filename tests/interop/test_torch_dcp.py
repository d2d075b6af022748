"""torch's own `torch.distributed.checkpoint`, without Megatron: what it reads of the torch_dist that ckptkit writes."""

import pytest
import torch
from support import models
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptkit
from interop.releases import release

LAYERS = EXPERTS = 12
GROUPS = 2  # of query heads that share a key and a value


def qkv(hf, layer, kind):
    """A query group after the other: its queries, its key, its value."""
    parts = [hf[f"{layer}.self_attn.{name}_proj.{kind}"].chunk(GROUPS) for name in "qkv"]
    return torch.cat([part[group] for group in range(GROUPS) for part in parts])


def gate_up(hf, module):
    return torch.cat([hf[f"{module}.gate_proj.weight"], hf[f"{module}.up_proj.weight"]])


def attention(hf, layer):
    return {
        "self_attention.linear_qkv.layer_norm_weight": hf[f"{layer}.input_layernorm.weight"],
        "self_attention.linear_qkv.weight": qkv(hf, layer, "weight"),
        "self_attention.linear_proj.weight": hf[f"{layer}.self_attn.o_proj.weight"],
    }


def qwen2(hf, layer):
    return {
        **attention(hf, layer),
        "self_attention.linear_qkv.bias": qkv(hf, layer, "bias"),
        "mlp.linear_fc1.layer_norm_weight": hf[f"{layer}.post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": gate_up(hf, f"{layer}.mlp"),
        "mlp.linear_fc2.weight": hf[f"{layer}.mlp.down_proj.weight"],
    }


def qwen3_moe(hf, layer):
    """A layer of Qwen3-MoE: norms of queries and keys, and experts, whose norm has a name for each of two specs."""
    experts = [f"{layer}.mlp.experts.{expert}" for expert in range(EXPERTS)]
    norm = hf[f"{layer}.post_attention_layernorm.weight"]
    return {
        **attention(hf, layer),
        "self_attention.q_layernorm.weight": hf[f"{layer}.self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": hf[f"{layer}.self_attn.k_norm.weight"],
        "pre_mlp_layernorm.weight": norm,
        "mlp.linear_fc1.layer_norm_weight": norm,
        "mlp.router.weight": hf[f"{layer}.mlp.gate.weight"],
        "mlp.experts.experts.linear_fc1.weight": torch.stack([gate_up(hf, expert) for expert in experts]),
        "mlp.experts.experts.linear_fc2.weight": torch.stack([hf[f"{expert}.down_proj.weight"] for expert in experts]),
    }


def expected(path, layer_of):
    """Every key that Megatron has for the release at `path`, put together by hand."""
    hf = models.tensors(path)
    tensors = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for layer in range(LAYERS):
        held = layer_of(hf, f"model.layers.{layer}")
        tensors |= {f"decoder.layers.{layer}.{name}": tensor for name, tensor in held.items()}
    return tensors


@pytest.fixture(scope="module", params=[qwen2, qwen3_moe], ids=["qwen2-untied", "qwen3_moe"])
def converted(request, tmp_path_factory):
    """ckptkit's torch_dist of a model, and what it is to hold."""
    root = tmp_path_factory.mktemp("dcp")
    release("qwen2-untied" if request.param is qwen2 else "qwen3_moe", root / "hf")
    ckptkit.convert(root / "hf", root / "megatron")
    return root / "megatron" / "release", expected(root / "hf", request.param)


def unequal(found, wanted):
    return sorted(found.keys() ^ wanted.keys()) + [
        key
        for key in sorted(found.keys() & wanted.keys())
        if found[key].dtype != wanted[key].dtype or not torch.equal(found[key], wanted[key])
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # that is meant
def test_load_reads_every_tensor_bit_for_bit(converted):
    path, wanted = converted
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        key: torch.full(entry.size, float("nan"), dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, checkpoint_id=path, no_dist=True)
    assert unequal(found, wanted) == []


def test_dcp_to_torch_save_writes_every_tensor_bit_for_bit(converted, tmp_path):
    path, wanted = converted
    dcp_to_torch_save(path, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    assert unequal({key: value for key, value in saved.items() if isinstance(value, Tensor)}, wanted) == []
