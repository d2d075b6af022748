"""Names weights that ckptkit does not read, and checkpoints that lie deeper than the path given, with the way out."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from itertools import chain, islice
from pathlib import Path

from ckptkit.core.errors import UnsupportedError

_RUNTIME = "{{}} is the format of {}: take the safetensors of the release"
_PICKLE = "{} is a pickle: convert .bin weights to safetensors first: load with transformers and save_pretrained"
_NEMO = "{} is of NeMo 1, whose weights ckptkit does not read: export them to HF with the NeMo that wrote them"
# What lies where safetensors with an index should, the most telling first, and the way out.
_INDEX, _SINGLE, _SHARDS = "model.safetensors.index.json", "model.safetensors", "*.safetensors"
_ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER = (
    "{} is an adapter (LoRA), not a model: `ckptkit verify ADAPTER --source BASE` looks at it; merge it with "
    "`ckptkit convert BASE DST --merge ADAPTER` and give the result"
)
_OTHER_WEIGHTS = {
    _ADAPTER_FILE: _ADAPTER,
    "adapter_model.bin": _ADAPTER,
    "consolidated*.safetensors": (
        "{} is Mistral's own format: take the model-*.safetensors of the release and their index"
    ),
    _SHARDS: "{} is there without model.safetensors.index.json: restore the index from the release",
    "consolidated*.pth": (
        "{} is the format of the model's authors: take the safetensors of the release, not its original/ folder"
    ),
    "*.gguf": (
        "{} is llama.cpp's format, which is quantized for it: start from the safetensors release, or load it with "
        "transformers (gguf_file=) and save_pretrained"
    ),
    "*.nemo": _NEMO,
    "model_config.yaml": _NEMO,
    "*.onnx": _RUNTIME.format("ONNX Runtime"),
    "onnx/*.onnx": _RUNTIME.format("ONNX Runtime"),
    "*.msgpack": _RUNTIME.format("Flax"),
    "*.h5": _RUNTIME.format("TensorFlow"),
    "model_world_size_*_rank_*.pt": (
        "{0} is one rank of an FSDP model as verl saves it: merge them with `python -m verl.model_merger merge "
        "--backend fsdp --local_dir {1} --target_dir OUT`"
    ),
    "*_model_states.pt": (
        "{} is one rank of a DeepSpeed run: put them together with the zero_to_fp32.py that DeepSpeed left beside the "
        "step's directory, with --safe_serialization"
    ),
    "pytorch_model*.bin": _PICKLE,
    "*.bin": _PICKLE,
    "*.pt": _PICKLE,
    "*.pth": _PICKLE,
}
_LOOKED_AT, _NAMED = 1000, 3  # folders below a path that is no checkpoint


def other_weights(root: Path) -> str | None:
    """What weights a directory holds instead of safetensors with an index, and the way out; None when it holds none."""
    if (found := _found(root)) is not None:
        return _OTHER_WEIGHTS[found[0]].format(found[1], root)
    if (root / "original").is_dir():
        return (
            "only original/ holds weights, in the format of the model's authors: "
            "download the *.safetensors beside it too"
        )
    return None


def refuse_other_format(root: Path) -> None:
    """Raises UnsupportedError where a directory without an index holds weights, and none as a model's safetensors."""
    found = None if any(os.path.lexists(root / one) for one in (_INDEX, _SINGLE)) else _found(root)
    if found is not None and found[0] != _SHARDS:
        advice = _OTHER_WEIGHTS[found[0]].format(found[1], root)
        raise UnsupportedError(f"{root} has neither {_INDEX} nor {_SINGLE}", advice)


def has_shards(root: Path) -> bool:
    """Whether a directory holds safetensors as transformers names them, or their index."""
    others = (_ADAPTER_FILE, "consolidated*")
    names = (path.name for path in root.glob(_SHARDS))
    return (root / _INDEX).exists() or any(not any(fnmatch(name, other) for other in others) for name in names)


def of_file(path: Path) -> str:
    """What to do about a file that was given instead of a directory."""
    for pattern, advice in _OTHER_WEIGHTS.items():
        if pattern != _SHARDS and fnmatch(path.name, pattern):
            return advice.format(path.name, path.parent)
    if path.suffix == ".safetensors" or path.name in ("config.json", _INDEX):
        return f"it is one file of a checkpoint: give the directory around it, {path.absolute().parent}"
    return "give the directory that holds config.json or .metadata"


def below(root: Path) -> str | None:
    """The checkpoints of one or two folders further down, as advice; None where there is none."""
    folders = islice(chain(root.glob("*/"), root.glob("*/*/")), _LOOKED_AT)
    found = sorted(str(one) for one in folders if _is_checkpoint(one))
    return f"a checkpoint lies further down: give {' or '.join(found[:_NAMED])}" if found else None


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in (".metadata", _INDEX, _SINGLE)) or (
        (found := _found(folder)) is not None and found[0] != "model_config.yaml"
    )


def _found(root: Path) -> tuple[str, str] | None:
    """The first of _OTHER_WEIGHTS that matches, and the name of a file; an adapter beside shards does not count."""
    shards = [path.name for path in sorted(root.glob(_SHARDS)) if path.name != _ADAPTER_FILE]
    for pattern, advice in _OTHER_WEIGHTS.items():
        files = sorted(path.name for path in root.glob(pattern))
        if files and not (shards and advice == _ADAPTER):
            return pattern, files[0] if pattern != _SHARDS else shards[0]
    return None
