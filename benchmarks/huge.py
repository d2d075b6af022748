"""Makes Kimi K2 without weights: real config, headers, index and `.metadata` over sparse files of full size."""

from __future__ import annotations

import json
import math
import pickle
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.planner import dims_of, expected_hf, rules_of
from ckptkit.core.dtypes import SAFETENSORS_CODE
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.detect import TRACKER
from ckptkit.formats.hf.reader import INDEX
from ckptkit.formats.torch_dist.names import disk_key, extra_states
from ckptkit.formats.torch_save.saved_tensor import SavedLayout

Form = Literal["bfloat16", "fp8", "int4"]

# Published sizes: moonshotai/Kimi-K2-Instruct (FP8) and Kimi-K2-Thinking (its routed experts in INT4).
_KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "torch_dtype": "bfloat16",
    "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 0, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_shared_experts": 1, "n_routed_experts": 384, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.827, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu", "attention_bias": False,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 262144, "tie_word_embeddings": False,
}  # fmt: skip
_FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": [
        "lm_head", "model.embed_tokens", "re:.*self_attn.*", "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*mlp\\.gate(\\.weight)?$",
    ],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
            "observer": "minmax",
        },
    }},
}  # fmt: skip
_QUANTIZATION: dict[Form, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {"quantization_config": _FP8},
    "int4": {"quantization_config": _INT4},
}
_TOKENIZER: dict[str, Any] = {  # the least that the tokenizers library reads
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}  # fmt: skip
_IN_FP8 = re.compile(r".+\.(self_attn|mlp)\.(.+\.)?\w+_proj(_with_mqa)?\.weight")
_RANKS = 64  # that Megatron's save came from: a file each


def kimi_k2(form: Form, layers: int = 61) -> dict[str, Any]:
    """config.json of Kimi K2, a trillion parameters, in bfloat16, in FP8 blocks or with experts in INT4."""
    return _KIMI_K2 | {"num_hidden_layers": layers} | _QUANTIZATION[form]


def stored(config: Mapping[str, Any], form: Form) -> dict[str, TensorSpec]:
    """Every tensor that a release of this model holds in this form, layer by layer and expert by expert."""
    shapes = expected_hf(config)
    names = sorted(shapes, key=lambda name: [int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", name)])
    return {spec.name: spec for name in names for spec in parts_of(name, shapes[name], form)}


def parts_of(name: str, shape: tuple[int, ...], form: Form) -> list[TensorSpec]:
    """A weight as it is stored: itself, or its quantized values with their scales."""
    if form == "fp8" and _IN_FP8.fullmatch(name):
        blocks = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
        return [TensorSpec(name, shape, "float8_e4m3fn"), TensorSpec(f"{name}_scale_inv", blocks, "float32")]
    if form == "int4" and ".mlp.experts." in name:
        rows, columns = shape
        parts = {
            "packed": ((rows, columns // 8), "int32"),
            "scale": ((rows, columns // 32), "bfloat16"),
            "shape": ((2,), "int32"),
        }
        return [TensorSpec(f"{name}_{part}", size, dtype) for part, (size, dtype) in parts.items()]
    return [TensorSpec(name, shape, "float32" if name.endswith("e_score_correction_bias") else "bfloat16")]


def make_hf(path: Path, config: Mapping[str, Any], form: Form, shards: int = 62) -> None:
    """An HF directory with config, index and headers; its files have their full sizes and hold nothing."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(dict(config), indent=2))
    (path / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    specs = stored(config, form)
    total = sum(spec.nbytes for spec in specs.values())
    weight_map, files = {}, list(_cut(specs.values(), total / shards))
    for index, several in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        _write_header(path / file, several)
        weight_map |= {spec.name: file for spec in several}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _cut(specs: Iterable[TensorSpec], size: float) -> Iterator[list[TensorSpec]]:
    """Tensors in order, a file each time that they come to `size` bytes."""
    taken: list[TensorSpec] = []
    nbytes, ends = 0, 1
    for spec in specs:
        taken.append(spec)
        nbytes += spec.nbytes
        if nbytes >= ends * size:
            yield taken
            taken, ends = [], ends + 1
    if taken:
        yield taken


def _write_header(path: Path, specs: Iterable[TensorSpec]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": SAFETENSORS_CODE[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def make_megatron(path: Path, config: Mapping[str, Any]) -> None:
    """Makes a Megatron root as 64 ranks save it: a layer's experts on one axis, gate and up of each in two chunks."""
    release, hf = path / "release", path / "hf"
    for folder in (path, release, hf):
        folder.mkdir()
    (hf / "config.json").write_text(json.dumps(dict(config), indent=2))
    dims = dims_of(config)
    objects = extra_states((rule.megatron for rule in rules_of(config)), dims.experts)
    (release / ".metadata").write_bytes(pickle.dumps(_metadata(release, _keys(config), objects)))
    common = {"args": Namespace(**megatron_args(dims)), "checkpoint_version": 3.0, "iteration": 0}
    torch.save(common, release / "common.pt")
    (release / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (path / TRACKER).write_text("release")


def _keys(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Megatron's keys on disk: the experts of a layer in one, on an axis before the others."""
    shapes: dict[int, tuple[int, ...]] = {}
    experts: dict[str, int] = defaultdict(int)
    found: dict[str, TensorSpec] = {}
    for rule in rules_of(config):
        if id(rule.mapping) not in shapes:
            shapes[id(rule.mapping)] = rule.megatron_shape
        key, expert = disk_key(rule.megatron)
        experts[key] += expert is not None
        axis = (experts[key],) if expert is not None else ()
        found[key] = TensorSpec(key, (*axis, *shapes[id(rule.mapping)]), "float32" if rule.mapping.fp32 else "bfloat16")
    return found


def _metadata(release: Path, keys: Mapping[str, TensorSpec], objects: Iterable[str]) -> Metadata:
    """Makes DCP's `Metadata` of these tensors and objects, and the files that it names, one rank's for each key."""
    ends = [0] * _RANKS
    pieces: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for index, (key, spec) in enumerate(keys.items()):
        rank, chunks = (
            index % _RANKS,
            [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in _boxes(spec)],
        )
        for number, chunk in enumerate(chunks):
            layout = _layout(tuple(chunk.sizes), spec.dtype)
            where = _StorageInfo(f"__{rank}_0.distcp", ends[rank], layout.size)
            storage[MetadataIndex(key, chunk.offsets, number)] = where
            pieces[rank] += [(ends[rank], layout.header(0)), (ends[rank] + layout.data.end, layout.trailer(0))]
            ends[rank] += layout.size
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=spec.torch_dtype), torch.Size(spec.shape), chunks)
    for key in objects:
        entries[key], storage[MetadataIndex(key)] = BytesStorageMetadata(), _StorageInfo("__0_0.distcp", ends[0], 1600)
        ends[0] += 1600
    for rank, end in enumerate(ends):
        with (release / f"__{rank}_0.distcp").open("wb") as file:
            for at, content in pieces[rank]:
                file.seek(at)
                file.write(content)
            file.truncate(end)
    return Metadata(entries, storage_data=storage, storage_meta=StorageMeta())


@cache
def _layout(shape: tuple[int, ...], dtype: str) -> SavedLayout:
    """How torch.save stores a tensor; its bytes are left out here, with a checksum of 0, which means none."""
    return SavedLayout.of(shape, dtype)


def _boxes(spec: TensorSpec) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of a key's chunks."""
    if ".experts.experts." not in spec.name:
        yield (0,) * len(spec.shape), spec.shape
        return
    experts, rows, columns = spec.shape
    parts = 2 if spec.name.endswith("linear_fc1.weight") else 1
    for expert in range(experts):
        for part in range(parts):
            yield (expert, part * rows // parts, 0), (1, rows // parts, columns)
