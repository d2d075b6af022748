"""The clean checkpoints that mutations break: six small models, as releases, in INT4 and as Megatron saves them."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from blake3 import blake3
from families import CASES, case
from support import models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckptkit.app.api import convert, quantize
from ckptkit.core.dtypes import dtype_name
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.quant.formats.scheme import QuantScheme
from mutations.edits import INDEX, edit_common, saved

# Tied with biases, untied, softmax router, sigmoid router (fp32 bias) and MTP, latent attention with MTP, multimodal.
MODELS = {
    "qwen2": "qwen2-tied",
    "qwen2-untied": "qwen2-untied",
    "qwen3_moe": "qwen3_moe",
    "glm4_moe": "glm4_moe-mtp",
    "deepseek_v3": "deepseek_v3",
    "kimi_k25": "kimi_k25",
}
# Groups of 32 do not divide the heads of the latent attention here; Kimi K2's INT4 release leaves attention out too.
_IGNORE = {"deepseek_v3": (r"re:.*\.self_attn\..*",)}
_SPECIAL = ("<pad>", "<bos>", "<unk>", "<eos>")
_TOKENS = 340  # fewer than the 352 rows of the embedding, as in most releases


def labels():
    """`MODEL/KIND` of each checkpoint.

    `hf`, `fused` (experts in one tensor), `int4`, `megatron`, `hybrid` (Megatron's HybridModel), and `trained` (with
    the state of an optimizer).
    """
    made = [f"{model}/{kind}" for kind in ("hf", "int4", "megatron") for model in MODELS]
    made = [label for label in made if label not in ("kimi_k25/int4", "kimi_k25/megatron")]
    return [*made, "qwen3_moe/fused", "glm4_moe/fused", "glm4_moe/hybrid", "qwen3_moe/trained"]


class Starts:
    """Makes each checkpoint at its first use. Read only: mutations break copies."""

    def __init__(self, root, cases=CASES):
        self._root = root
        self._cases = cases

    def path(self, label):
        model, _, kind = label.partition("/")
        path = self._root / model / kind
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            self._make(model, kind, path)
        return path

    def source(self, label):
        return self.path(f"{label.partition('/')[0]}/hf")

    def manifest(self, label):
        """What `verify --manifest` of an HF checkpoint names, computed without ckptkit."""
        path = self.path(label)
        file = path.with_suffix(".json")
        if not file.exists():
            beside = [one.name for one in sorted(path.iterdir()) if one.suffix != ".safetensors" and one.name != INDEX]
            content = {
                "schema": "ckptkit-manifest/2",
                "tensors": {
                    name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _digest(tensor)]
                    for name, tensor in models.tensors(path).items()
                },
                "files": {name: blake3((path / name).read_bytes()).hexdigest() for name in beside},
            }
            file.write_text(json.dumps(content))
        return file

    def _make(self, model, kind, path):
        name = MODELS.get(model, model)
        if kind in ("hf", "fused"):
            case.save(name, self._cases[name], path, torch.bfloat16, fused=kind == "fused")
            write_tokenizer(path)
        elif kind == "int4":
            quantize(self.source(model), path, QuantScheme(32, "qmax7", _IGNORE.get(model, ())))
        else:
            convert(self.source(model), path, dialect="hybrid" if kind == "hybrid" else None)
            if kind == "trained":
                add_optimizer(path)


def _digest(tensor):
    return blake3(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def write_tokenizer(path):
    """The tokenizer files of a release: 340 tokens, the special ones that config.json means, a chat template."""
    tokens = (*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), _TOKENS)))
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([*_SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 256,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(
        "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}\n"
    )


def add_optimizer(path):
    """Adds what `fully_reshardable` of megatron-core's distributed optimizer saves: float32, a key for each weight."""
    torch.manual_seed(0)
    with (path / "release" / "__0_9.distcp").open("wb") as file:

        def add(content):
            weights = [key for key, one in content.state_dict_metadata.items() if hasattr(one, "chunks")]
            for key in weights:
                for kind in ("param", "exp_avg", "exp_avg_sq"):
                    _add(content, key, kind)

        def _add(content, key, kind):
            name, entry = f"optimizer.state.{kind}.{key}", content.state_dict_metadata[key]
            content.state_dict_metadata[name] = replace(
                entry, properties=replace(entry.properties, dtype=torch.float32)
            )
            for at, info in [one for one in content.storage_data.items() if one[0].fqn == key]:
                sizes = next(tuple(one.sizes) for one in entry.chunks if one.offsets == at.offset)
                blob = Blob(path / "release" / info.relative_path, info.offset, info.length)
                state = _state(kind, blob.tensor(dtype_name(entry.properties.dtype), sizes))
                begin = file.tell()
                file.write(saved(state))
                content.storage_data[MetadataIndex(name, at.offset, at.index)] = replace(
                    info, relative_path=Path(file.name).name, offset=begin, length=file.tell() - begin
                )

        models.edit_metadata(path / "release", add)
    edit_common(path, lambda common: common.update(iteration=10))


def _state(kind, weight):
    """State of a weight after a step; the master weight differs by less than bfloat16 shows."""
    noise = torch.rand(weight.shape)
    return weight.float() * (1 + noise * 2**-10) if kind == "param" else noise + 1
