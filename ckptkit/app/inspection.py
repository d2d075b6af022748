"""Describes the checkpoint at a path or URL from headers, and for an adapter also whether its factors are zeros."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ckptkit.converters.config.values import language_part
from ckptkit.converters.draft import draft_of, is_draft
from ckptkit.converters.lora_settings import idle_reason
from ckptkit.converters.megatron.arguments import NO_ARGUMENT_KEY, inexpressible, megatron_args
from ckptkit.converters.megatron.hybrid_model import is_hybrid, stored_pattern
from ckptkit.converters.megatron.legacy import LegacyCheckpoint
from ckptkit.converters.megatron.run_config import stored_args
from ckptkit.converters.open import open_checkpoint
from ckptkit.converters.planner import HYBRID, MCORE
from ckptkit.converters.registry import named_family_of, unwitnessed
from ckptkit.converters.stored import adapt_config
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.core.signature import public
from ckptkit.core.specs import TensorSpec, fold
from ckptkit.formats.deltas import chain_at, patches_of
from ckptkit.formats.detect import Location, locate, refuse_hf
from ckptkit.formats.hf.adapter import AdapterFiles, is_adapter
from ckptkit.formats.hf.hub_cache import downloads_in
from ckptkit.formats.hf.reader import HfCheckpoint, stored_names
from ckptkit.formats.hf.remote import config_at, open_directory
from ckptkit.formats.hf.side_files import declared_quantization, is_quantized
from ckptkit.formats.torch_dist.reader import Layout, TorchDistCheckpoint
from ckptkit.formats.torch_dist.training_state import describe_state, training_state
from ckptkit.storage.directory import Directory
from ckptkit.storage.url import is_url, path_or_url

_DELTAS = "deltas (slime, miles, vime)"
_LONGEST_PATTERN = 2000  # letters; a model of a hundred layers has 200
_LAYOUTS: dict[Layout, str] = {
    "torch_dist": "Megatron torch_dist",
    "NeMo": "Megatron torch_dist, of NeMo 2",
    "fsdp_dtensor": "Megatron fsdp_dtensor",
    "torch_dcp": "Megatron torch_dcp",
}
_ROTARY = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rope_scaling", "rope_parameters")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@public()
def inspect(path: str | Path, hf: str | Path | None = None) -> dict[str, Any]:
    """Describes the checkpoint at `path`: format, sizes, dtypes, dimensions, arguments, folded tensor names."""
    with _open_both(path, hf) as (local, local_hf):
        if is_adapter(local.path):
            refuse_hf(hf, path)
            return _adapter_facts(local)
        location = locate(local)
        if location.kind == "hf":
            refuse_hf(hf, path)
        facts = _delta_facts(location.path) if location.kind == "deltas" else {}
        return facts if facts and not local_hf else facts | _facts(location, open_checkpoint(local, hf=local_hf))


def model_arguments(path: str | Path, hf: str | Path | None = None) -> dict[str, Any]:
    """Megatron-LM arguments (argparse names) of the model at `path`, from its HF config; config.json suffices.

    For a Megatron checkpoint, they are those of its class, GPTModel or HybridModel. MTP layers without tensors are
    left out. `no_argument_for` lists features without arguments. Raises CkptkitError for an unsupported model.
    """
    if (config := config_at(path_or_url(path))) is not None:
        refuse_hf(hf, path)
        names = () if is_url(path) else stored_names(Path(path))
        return _arguments(adapt_config(config, names) if names else config)
    with _open_both(path, hf) as (local, local_hf):
        checkpoint = open_checkpoint(local, hf=local_hf)
        hybrid = isinstance(checkpoint, TorchDistCheckpoint) and is_hybrid(checkpoint.specs)
        return _arguments(adapt_config(checkpoint.config, checkpoint.specs), HYBRID if hybrid else MCORE)


@contextmanager
def _open_both(path: str | Path, hf: str | Path | None) -> Iterator[tuple[Directory, Directory | None]]:
    """The directories of a checkpoint and of its `--hf`."""
    with ExitStack() as stack:
        yield (
            stack.enter_context(open_directory(path_or_url(path))),
            stack.enter_context(open_directory(path_or_url(hf))) if hf else None,
        )


def _facts(location: Location, checkpoint: Checkpoint) -> dict[str, Any]:
    specs = checkpoint.specs
    facts: dict[str, Any] = {"path": str(location.directory), "format": _format(location)}
    text = language_part(checkpoint.config)
    layers = text.get("num_hidden_layers", text.get("n_layer"))
    facts["architecture"] = f"{checkpoint.config.get('model_type')}" + (f", {layers} layers" if layers else "")
    # The elements of a packed tensor are not parameters.
    facts |= _sizes(specs, is_packed=isinstance(checkpoint, HfCheckpoint) and is_quantized(checkpoint.config))
    if isinstance(checkpoint, HfCheckpoint):
        if records := downloads_in(location.path):
            origins = ", ".join(dict.fromkeys(one.origin for one in records.values()))
            facts["download"] = f"{origins}: {len(records)} files have a recorded hash, which `ckptkit verify` compares"
        facts["files"] = {file: len(shard.specs) for file, shard in checkpoint.shards.items()}
        facts["config"] = {key: value for key, value in checkpoint.config.items() if not isinstance(value, dict)}
        facts |= _draft_facts(checkpoint.config)
        if rope := _rope(checkpoint.config):
            facts["rope"] = rope
        facts["quantization"] = "only the key-value cache" if declared_quantization(checkpoint.config) else None
        if is_quantized(checkpoint.config):
            from ckptkit.quant.formats.dequantize import describe_format

            facts["quantization"] = describe_format(checkpoint.config, checkpoint.specs)
    elif isinstance(checkpoint, (TorchDistCheckpoint, LegacyCheckpoint)):
        facts["iteration"] = location.path.name
        facts["model"] = "GPTModel"
        if is_hybrid(specs):
            pattern = stored_pattern(stored_args(checkpoint.path, checkpoint.args)) or "not stored"
            shown = pattern if len(pattern) <= _LONGEST_PATTERN else shortened(pattern)
            facts["model"] = f"HybridModel, layer pattern {shown}"
        if isinstance(checkpoint, LegacyCheckpoint):
            facts["ranks"] = f"{len(checkpoint.files.ranks)} files of {checkpoint.files.sizes}"
        if isinstance(checkpoint, TorchDistCheckpoint):
            facts["format"] = _LAYOUTS[checkpoint.metadata.layout]
            state = training_state(checkpoint.metadata, checkpoint.common)
            facts["training state"] = {"summary": describe_state(state), **state} if state else None
        args = stored_args(location.path, checkpoint.args)
        facts["args"] = {key: value for key, value in args.items() if isinstance(value, (int, float, str, list))}
    if message := unwitnessed(checkpoint.config):
        facts["unwitnessed"] = message
    facts["names"] = _folded(specs)
    return facts


def _sizes(specs: Mapping[str, TensorSpec], is_packed: bool = False) -> dict[str, Any]:
    parameters = {} if is_packed else {"parameters": sum(math.prod(spec.shape) for spec in specs.values())}
    nbytes, dtypes = sum(spec.nbytes for spec in specs.values()), Counter(spec.dtype for spec in specs.values())
    return {"tensors": len(specs), "bytes": nbytes, **parameters, "dtypes": dict(dtypes)}


def _draft_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of an EAGLE draft model, and the sizes of its target."""
    if not is_draft(config):
        return {}
    try:
        draft = draft_of(config)
    except UnsupportedError as error:
        return {"draft": error.message}
    target = {"hidden_size": draft.target_hidden, "vocab_size": draft.vocabulary}
    layers = ", ".join(map(str, draft.layer_ids)) or "the engine's default"
    return {
        "draft": f"{draft.label} that can propose {draft.draft_vocabulary} tokens",
        "target": target | ({"states": draft.states, "layers": layers} if draft.version == 3 else {}),
    }


def _adapter_facts(directory: Directory) -> dict[str, Any]:
    files = AdapterFiles(directory.path)
    shown = (
        *("base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
        *("target_modules", "target_parameters", "modules_to_save"),
    )
    idle = idle_reason(files)
    return {
        "path": str(directory),
        "format": f"PEFT adapter, {str(files.config.get('peft_type'))[:40]}",
        **({"changes": f"nothing: {idle}"} if idle is not None else {}),
        **_sizes(files.specs),
        "config": {key: files.config[key] for key in shown if files.config.get(key)},
        "names": _folded(files.specs),
    }


def _delta_facts(path: Path) -> dict[str, Any]:
    """The contents of a directory of deltas, without its base."""
    chain = chain_at(path)
    patches = patches_of(chain)
    changed = {one.number: sum(len(shard.sound().specs) for shard in one.shards) for one in chain.deltas}
    return {
        "path": str(path),
        "format": _DELTAS,
        "tensors": len(patches),
        "bytes": sum(shard.nbytes for one in chain.deltas for shard in one.shards),
        "starts from": str(chain.full or "version 0, the checkpoint that training began with"),
        "encoding": ", ".join(sorted({str(one.metadata.get("delta_encoding")) for one in chain.deltas})),
        "versions": [f"{number}: {count} tensors changed" for number, count in changed.items()],
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of the language model in config.json, under either spelling."""
    text = language_part(config)
    rope: dict[str, Any] = {}
    for key in _ROTARY:
        inner = text.get(key)
        if isinstance(inner, dict):
            rope |= {f"{key}.{name}": value for name, value in inner.items()}
        elif inner is not None:
            rope[key] = inner
    return rope


def _arguments(config: Mapping[str, Any], dialect: str = MCORE) -> dict[str, Any]:
    if (message := unwitnessed(config)) is not None:
        raise UnsupportedError(f"config.json: {message}", "Megatron has no arguments for this model")
    dims = named_family_of(config).read_dims(config)
    lines = inexpressible(dims)
    if dialect == HYBRID or dims.pattern:
        lines = [*lines, "the class: Megatron-LM's pretrain_hybrid.py builds HybridModel, pretrain_gpt.py GPTModel"]
    # Not part of the model: without it the order of adding up experts differs between runs (CK719).
    fused = {"moe_permute_fusion": True} if dims.experts else {}
    return megatron_args(dims, dialect) | fused | ({NO_ARGUMENT_KEY: lines} if lines else {})


def _format(location: Location) -> str:
    if location.kind == "deltas":
        return _DELTAS
    if location.kind == "hf":
        return "HF safetensors"
    return "Megatron legacy torch (mp_rank_*)" if location.legacy else "Megatron torch_dist"


def _count(folded: str) -> int:
    """The number of tensors of a folded name: `{0..3,7}` means 5 numbers."""
    lists = [[part.split("..") for part in found.split(",")] for found in re.findall(r"\{([\d.,]+)\}", folded)]
    return math.prod(sum(int(end[-1]) - int(end[0]) + 1 for end in ends) for ends in lists)


def _folded(specs: Mapping[str, TensorSpec]) -> list[str]:
    """One line for tensors that differ only in layer and expert numbers: names, `[shape]`, dtype and their count."""
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, spec in specs.items():
        pattern = ".".join("" if part.isdecimal() else part for part in name.split("."))
        groups.setdefault((pattern, spec.shape, spec.dtype), []).append(name)
    lines = []
    for (_, shape, dtype), names in groups.items():
        for folded in fold(names):
            count = f" x{found}" if (found := _count(folded)) > 1 else ""
            lines.append(f"{folded} [{','.join(map(str, shape))}] {_SHORT.get(dtype, dtype)}{count}")
    return lines
