"""What a test model of a family is, and how it is saved as a release would look."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# 12 layers and 12 experts (not a power of two, two digits). Matrices of different kinds differ in shape, also with gate
# above up, with q, k and v in one and with the vocabulary padded for 1 or 2 ranks: a swap of two kinds never fits.
SIZES = {
    "vocab_size": 352,
    "hidden_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 288,
    "max_position_embeddings": 256,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 96, "num_experts_per_tok": 3}


def random(name, tensor, dtype):
    """A value for a parameter or a persistent buffer of the model: nothing that a mistake could leave unchanged."""
    if name.endswith("e_score_correction_bias"):
        return 6.9 + 0.1 * torch.randn(tensor.shape)
    norm = "norm" in name
    return (torch.randn(tensor.shape) * (0.2 if norm else 0.02) + norm).to(dtype)


def strong_mlp(name, tensor, dtype):
    """As `random`, with MLPs and experts that matter more."""
    return random(name, tensor, dtype) * (2 if ".mlp." in name and tensor.dim() > 1 else 1)


def mixer_value(name, tensor, dtype):
    """As `random`, with mixers that forget over some tokens."""
    if name.endswith(("A_log", "dt_bias")):
        return (torch.randn(tensor.shape) * 0.5 - (1 if name.endswith("dt_bias") else 0)).to(dtype)
    return random(name, tensor, dtype)


def biases_in_float32(name, tensor):
    """The router's bias is float32 in releases, where transformers saves it in the model's dtype."""
    if not name.endswith("e_score_correction_bias") or tensor.dtype == torch.float32:
        return tensor
    return tensor.float() * (1 + 2**-12)  # no value of bfloat16, and as good as the model's own


@dataclass(frozen=True)
class Case:
    """A model of a family for tests.

    `config` makes the transformers config, `edit` changes config.json to what the release says.
    `added` gives by HF name the tensors that only the release has (MTP layers, a vision tower).
    `value` initializes a tensor by name.
    `reference` gives the logits [batch, sequence, vocabulary] to compare with; by default transformers' own model.
    `mtp` gives those of all multi-token prediction layers [layers x batch, sequence, vocabulary].
    `witness` and `mtp_witness` say in a few words what those logits were computed with, for docs/families.md.
    `fused`: whether transformers v5 would also save it with fused experts.
    `prefix` stands before transformers' names in the release, as in a multimodal one.
    `stored`: a tensor as it lies in the release.
    `renamed`: names that transformers saves otherwise than the release has them, with the release's.
    `whole`: the tensors of the release, from all that transformers saves, where they are not the same one by one.
    `packed`: patterns of what is INT4 inside a decoder layer, for a new family that is not plainly dense.
    `since` and `before`: the first megatron-core (major, minor) that can compute the model, with the witness's changes,
    and the first that no longer can.
    """

    config: Callable[[], PretrainedConfig]
    added: Callable[[PreTrainedModel, torch.dtype], Mapping[str, Tensor]] = lambda model, dtype: {}
    edit: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    value: Callable[[str, Tensor, torch.dtype], Tensor] = random
    auto: Any = AutoModelForCausalLM
    reference: Callable[[PreTrainedModel, Tensor], Tensor] = lambda model, tokens: model(tokens).logits
    mtp: Callable[[PreTrainedModel, Mapping[str, Tensor], Tensor], Tensor] | None = None
    witness: str = "transformers"
    mtp_witness: str = "reference"
    fused: bool = False
    prefix: str = ""
    stored: Callable[[str, Tensor], Tensor] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    whole: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    since: tuple[int, int] = (0, 0)
    before: tuple[int, int] | None = None
    packed: tuple[str, ...] = ()


def build(name, case, dtype):
    """The model, seeded by its name, every parameter random (norms and biases too)."""
    torch.manual_seed(sum(map(ord, name)))
    model = case.auto.from_config(case.config(), dtype=dtype)
    for key, parameter in model.named_parameters():
        parameter.data = case.value(key, parameter.data, parameter.dtype)
    for key, buffer in model.named_buffers():
        if key in model.state_dict():
            buffer.copy_(case.value(key, buffer, buffer.dtype))
    return model.eval()


def save(name, case, path, dtype, *, fused=False, shard_size="400KB"):
    """Saves the model as a release: shards, an index, side files. Returns the model and the tensors added."""
    model = build(name, case, dtype)
    model.save_pretrained(path, max_shard_size=shard_size, save_original_format=not fused)
    shards = [load_file(file) for file in sorted(path.glob("model*.safetensors"))]
    if case.stored:
        shards = [{case.renamed.get(key, key): case.stored(key, one) for key, one in each.items()} for each in shards]
    if case.whole:
        whole = case.whole({key: tensor for each in shards for key, tensor in each.items()})
        names, count = sorted(whole), len(shards)
        edges = [-(-len(names) * place // count) for place in range(count + 1)]
        shards = [{key: whole[key] for key in names[begin:end]} for begin, end in pairwise(edges)]
    added = case.added(model, dtype)
    if added:
        shards = [*({case.prefix + key: tensor for key, tensor in each.items()} for each in shards), added]
    if case.stored or case.whole or added:
        _write(path, shards)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(case.edit(config), indent=2) + "\n")
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    (path / "tokenizer.model").write_bytes(b"a stand-in for words, which nothing here reads")
    return model, added


def _write(path, shards):
    """Replaces all weights by these shards, with their index where they are several."""
    for file in path.glob("model*.safetensors"):
        file.unlink()
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({key: one.contiguous().clone() for key, one in shard.items()}, path / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def renamed(tensors, names):
    """The tensors under other names: each of the patterns in `names` is replaced in turn."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = re.sub(old, new, name)
        found[name] = tensor
    return found


def tokens(length=16):
    return torch.randint(0, SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(0))


def far(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())
