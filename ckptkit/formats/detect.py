"""Detects the checkpoint at a path: an HF directory, a Megatron checkpoint with its iteration, or published deltas."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from ckptkit.core.errors import CkptkitError, DamagedError, MissingError, UnsupportedError, UsageError
from ckptkit.storage.directory import Directory, Listing
from ckptkit.storage.regular import read_regular
from ckptkit.storage.tree import files_below

_RUNTIME = "download the safetensors of the release: {{}} is in the format of {}"
_PICKLE = "convert the pickle {} to safetensors first: load the model with transformers and save_pretrained"
_NEMO = "{} is a NeMo 1 checkpoint, which ckptkit does not read: export it to HF with the NeMo that wrote it"
# Weights in other formats than safetensors with an index, the most specific first, and the user's next step.
_INDEX, _SINGLE, _SHARDS = "model.safetensors.index.json", "model.safetensors", "*.safetensors"
_ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER = (
    "{} is an adapter (LoRA), not a model: `ckptkit verify ADAPTER --source BASE` verifies it; merge it with "
    "`ckptkit convert BASE DST --merge ADAPTER` and pass the result"
)
_OTHER_WEIGHTS = {
    _ADAPTER_FILE: _ADAPTER,
    "adapter_model.bin": _ADAPTER,
    "consolidated*.safetensors": (
        "download the release's model-*.safetensors and their index: {} is in Mistral's own format"
    ),
    _SHARDS: "{} has no model.safetensors.index.json: restore the index from the release",
    "consolidated*.pth": (
        "download the release's safetensors, not its original/ folder: {} is in the format of the model's authors"
    ),
    "*.gguf": (
        "{} is llama.cpp's quantized format: start from the safetensors release, or load it with transformers "
        "(gguf_file=) and save_pretrained"
    ),
    "*.nemo": _NEMO,
    "model_config.yaml": _NEMO,
    "*.onnx": _RUNTIME.format("ONNX Runtime"),
    "onnx/*.onnx": _RUNTIME.format("ONNX Runtime"),
    "*.msgpack": _RUNTIME.format("Flax"),
    "*.h5": _RUNTIME.format("TensorFlow"),
    "model_world_size_*_rank_*.pt": (
        "{0} is one rank of an FSDP model of verl: merge all ranks with `python -m verl.model_merger merge --backend "
        "fsdp --local_dir {1} --target_dir OUT`"
    ),
    "*_model_states.pt": (
        "{} is one rank of a DeepSpeed run: merge all ranks with DeepSpeed's zero_to_fp32.py, next to the step's "
        "directory, with --safe_serialization"
    ),
    "pytorch_model*.bin": _PICKLE,
    "*.bin": _PICKLE,
    "*.pt": _PICKLE,
    "*.pth": _PICKLE,
}
_SEARCHED, _NAMED = 1000, 3  # folders below a path without a checkpoint


def other_weights(root: Path) -> str | None:
    """Describes weights in another format than safetensors with an index, and the next step, or None without any."""
    if (found := _find_other_weights(root)) is not None:
        return _OTHER_WEIGHTS[found[0]].format(found[1], root)
    if (root / "original").is_dir():
        return "only original/ has weights, in the format of the model's authors: also download the *.safetensors"
    return None


def refuse_other_format(root: Path) -> None:
    """Raises UnsupportedError if a directory has only weights in another format."""
    found = None if any(os.path.lexists(root / one) for one in (_INDEX, _SINGLE)) else _find_other_weights(root)
    if found is not None and found[0] != _SHARDS:
        advice = _OTHER_WEIGHTS[found[0]].format(found[1], root)
        raise UnsupportedError(f"{root} has neither {_INDEX} nor {_SINGLE}", advice)


def has_shards(root: Path) -> bool:
    """Whether a directory has safetensors with transformers' names, or their index."""
    others = (_ADAPTER_FILE, "consolidated*")
    names = (path.name for path in root.glob(_SHARDS))
    return (root / _INDEX).exists() or any(not any(fnmatch(name, other) for other in others) for name in names)


def _hint_for_file(path: Path) -> str:
    """The next step after a file was given instead of a directory."""
    for pattern, advice in _OTHER_WEIGHTS.items():
        if pattern != _SHARDS and fnmatch(path.name, pattern):
            return advice.format(path.name, path.parent)
    if path.suffix == ".safetensors" or path.name in ("config.json", _INDEX):
        return f"pass the directory of the checkpoint: {path.absolute().parent}"
    return "pass the directory that contains config.json or .metadata"


def _hint_below(root: Path) -> str | None:
    """Advice to give a checkpoint one or two folders further down, or None if there is none."""

    def is_checkpoint(folder: Path) -> bool:
        marked = any((folder / mark).exists() for mark in (".metadata", _INDEX, _SINGLE))
        return marked or ((found := _find_other_weights(folder)) is not None and found[0] != "model_config.yaml")

    folders = islice(chain(root.glob("*/"), root.glob("*/*/")), _SEARCHED)
    found = sorted(str(one) for one in folders if is_checkpoint(one))
    return f"pass a checkpoint in this directory: {' or '.join(found[:_NAMED])}" if found else None


def _find_other_weights(root: Path) -> tuple[str, str] | None:
    """The first pattern of _OTHER_WEIGHTS that matches, and a file's name; ignores an adapter next to shards."""
    shards = [path.name for path in sorted(root.glob(_SHARDS)) if path.name != _ADAPTER_FILE]
    for pattern, advice in _OTHER_WEIGHTS.items():
        files = sorted(path.name for path in root.glob(pattern))
        if files and not (shards and advice == _ADAPTER):
            return pattern, files[0] if pattern != _SHARDS else shards[0]
    return None


MANIFEST = "ckptkit.json"
SIGNATURE_ENDING = ".sig"
TRACKER = "latest_checkpointed_iteration.txt"
_BACKEND = "metadata.json"
_NEXT_TO_ITERATION = (MANIFEST, MANIFEST + SIGNATURE_ENDING, "hf", "carried")  # files and folders of ckptkit
_MAX_TRACKER = 256  # bytes
_MAX_DIGITS = 18  # of an iteration
ITERATION = re.compile(r"iter_\d{7}")
VERSION = re.compile(r"weight_v(\d{6,12})")  # a published weight update of slime, miles or vime, with its number
LEGACY_RANK = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
LEGACY_FILE = "model_optim_rng.pt"
ADDITIONAL_TEMPLATES = "additional_chat_templates"
# Files of a checkpoint that transformers, SGLang, vLLM, sentence-transformers, PEFT or Megatron read by name.
LOADED = frozenset(
    {
        *("config.json", "generation_config.json", "adapter_config.json", "params.json", "metadata.json"),
        *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        # Files of tokenizer classes in addition to vocabularies. Source: transformers 5.12, each `VOCAB_FILES_NAMES`.
        *("normalizer.json", "byte_maps.json", "emoji.json", "entity_vocab.json", "word_shape.json"),
        *("word_pronunciation.json", "bpe.codes", "dict.txt"),
        *("vocab.json", "merges.txt", "vocab.txt", "tekken.json", "chat_template.json", "chat_template.jinja"),
        *("processor_config.json", "preprocessor_config.json", "image_processor.json"),
        *("video_preprocessor_config.json", "feature_extractor.json"),
        *("quant_config.json", "quantize_config.json", "quantization_config.json", "hf_quant_config.json"),
        *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "model_index.json"),
    }
)
_CODE = ".py"
_LOADED_ENDINGS = (".jinja", _CODE, ".model", ".tiktoken", ".spm")
_LOADED_FOLDERS = (ADDITIONAL_TEMPLATES, "custom_generate")
# A URL converted to a Path: made absolute, with one slash.
_URL = re.compile(r"(?:^|/)([a-z][a-z0-9+.-]*):/+(.*)", re.IGNORECASE)

Kind = Literal["hf", "megatron", "deltas"]


@dataclass(frozen=True)
class Location:
    """A checkpoint found by `locate`.

    `path` has the weights; `root` is the user's path or, for Megatron, the directory with the tracker. `remote` lists
    the files of an HF directory at a URL; `path` then has copies of its small files and headers.
    """

    kind: Kind
    path: Path
    root: Path
    remote: Listing | None = None

    @property
    def directory(self) -> Directory:
        """The directory of the weights."""
        return Directory(self.path, self.remote)

    @property
    def legacy(self) -> bool:
        """Whether these are Megatron's older files of one rank each (`mp_rank_*`)."""
        return self.kind == "megatron" and is_legacy(self.path)


def locate(path: str | Path | Directory) -> Location:
    """The checkpoint at `path`. Raises CkptkitError if none or ambiguous, and like `require_own_files`."""
    if isinstance(path, Directory):
        return replace(locate(path.path), remote=path.remote)
    location = _find_checkpoint(path)
    require_own_files(path)
    return location


def require_own_files(path: str | Path) -> None:
    """Raises CkptkitError like `files_below` for the files to read at `path`; in a Megatron root, of one iteration."""
    root = Path(path).absolute()
    if not root.is_dir():
        return
    around, folders = root.parent, [root]
    if os.path.lexists(root / TRACKER) or is_nemo(root):
        around, folders = root, [root / name for name in (TRACKER, "context", "weights", *_NEXT_TO_ITERATION)]
        with suppress(MissingError, DamagedError, UsageError, UnsupportedError):  # raised again when it is read
            iteration_of(root)
    elif VERSION.fullmatch(root.name):  # earlier versions are also read
        folders += [folder for folder in around.iterdir() if VERSION.fullmatch(folder.name)]
    elif any((root / name).exists() for name in (".metadata", _BACKEND)) or is_legacy(root):
        folders += [around / name for name in _NEXT_TO_ITERATION]
    for folder in folders:
        files_below(folder, None if folder == root else around)


def _find_checkpoint(path: str | Path) -> Location:
    shown, root = Path(path), Path(path).absolute()
    refuse_url(path)
    if not root.exists():
        # `ORG/NAME` may be a model on the Hub.
        name = f"hf://{root.parent.name}/{root.name}"
        on_hub = f", or pass {name}, which inspect, convert and quantize read from the Hugging Face Hub"
        is_name = root.parent.parent == Path.cwd() and not root.parent.exists()
        raise MissingError(f"{shown} does not exist", f"check the path{on_hub if is_name else ''}")
    if not root.is_dir():
        raise CkptkitError(f"{shown} is a file, not a checkpoint directory", _hint_for_file(shown))
    if (root / TRACKER).exists() or is_nemo(root):
        return Location("megatron", iteration_of(root), root)
    is_hf = (root / "config.json").exists()
    if root.name == "original" and (root.parent / "config.json").exists():
        message = f"{shown} has weights in the format of the model's authors"
        raise CkptkitError(message, f"pass the HF directory around it: {shown.parent}")
    if (root / ".metadata").exists() or ((root / "metadata.json").exists() and not is_hf) or is_legacy(root):
        return Location("megatron", root, root.parent)
    if is_deltas(root):
        return Location("deltas", root, root)
    if is_hf or has_shards(root):
        return Location("hf", root, root)
    raise MissingError(f"{shown} contains no checkpoint", _why_not(root))


def is_loaded(relative: Path) -> bool:
    """Whether loaders read a file (relative to an HF directory) in addition to weights: settings, templates, code.

    `auto_map` may name code in a folder (`pkg/modeling.Model`), but not in a hidden one.
    Source: transformers 5.12 `dynamic_module_utils.py` (`get_class_from_dynamic_module`).
    """
    *folders, name = relative.parts
    if any(part.startswith(".") for part in relative.parts):
        return False
    if folders:
        return name.endswith(_CODE) or (len(folders) == 1 and folders[0] in _LOADED_FOLDERS)
    return name in LOADED or name.endswith(_LOADED_ENDINGS)


def refuse_url(path: str | Path) -> None:
    """Raises CkptkitError for a URL, or one converted to a Path, unless a file or directory has that name."""
    if (url := _URL.search(str(path))) and not Path(path).exists():
        hint = "copy it to a local disk; inspect, convert and quantize read HF directories from URLs"
        raise CkptkitError(f"{url[1]}://{url[2]} is a URL, which this command does not read", hint)


def refuse_hf(hf: str | Path | None, path: str | Path) -> None:
    """Raises UsageError if `--hf` is given for an HF checkpoint at `path`."""
    if hf:
        message = "--hf has no effect here: it passes the config of a Megatron checkpoint"
        raise UsageError(message, f"remove --hf: {path} is an HF checkpoint")


def is_legacy(path: Path) -> bool:
    """Whether an iteration's directory has one directory per rank and is not a torch_dist checkpoint."""
    return (
        path.is_dir()
        and not (path / ".metadata").exists()
        and any(LEGACY_RANK.fullmatch(entry.name) for entry in path.iterdir())
    )


def is_deltas(root: Path) -> bool:
    """Whether a directory without config.json is a published weight update, or contains one."""
    if (root / "config.json").exists():
        return False
    is_version = VERSION.fullmatch(root.name) is not None
    return is_version or (root.is_dir() and any(VERSION.fullmatch(entry.name) for entry in root.iterdir()))


def is_nemo(root: Path) -> bool:
    """Whether this is a checkpoint of NeMo 2, with Megatron's weights and the training's context in two folders."""
    return (root / "context").is_dir() and any((root / "weights" / name).exists() for name in (".metadata", _BACKEND))


def iteration_of(root: Path) -> Path:
    """The directory of weights of a Megatron root or iteration. Raises like `tracked_iteration`, and for zarr."""
    if (root / TRACKER).exists():
        return tracked_iteration(root)
    if not is_nemo(root):
        return root
    if not (root / "weights" / ".metadata").exists():
        hint = "save it as torch_dist with its NeMo (before 2.1 the default was zarr), or export it to HF"
        raise UnsupportedError(f"{root} is a NeMo 2 checkpoint with weights in another format than torch_dist", hint)
    return root / "weights"


def tracked_iteration(root: Path) -> Path:
    """The directory named by the tracker of a Megatron root.

    Raises CkptkitError if missing, like `files_below`, and for the root of a verl run or a save of miles' FSDP trainer.
    """
    text = tracker_text(root)
    if text != "release" and not (text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise DamagedError(f"{root / TRACKER} contains {text!r}", "write `release` or an iteration number into it")
    path = root / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not path.is_dir():
        missing = f"{root / TRACKER} contains {text!r}, but {path.name}/ is missing"
        if (step := root / f"global_step_{text}").is_dir():
            raise UsageError(missing, f"this is a run of verl: {_hint_below(step) or f'look into {step}'}")
        raise MissingError(missing, "restore this directory: the save was interrupted, or it was moved")
    files_below(path, root)
    if (path / "model" / ".metadata").exists() and not (path / ".metadata").exists():
        hint = f"export it with miles' tools/convert_fsdp_to_hf.py, --input-dir {path}, and pass the result"
        raise UnsupportedError(f"{path} was saved by miles' FSDP trainer, not by Megatron", hint)
    return path


def tracker_text(root: Path) -> str:
    """The contents of a Megatron root's tracker. Raises CkptkitError if it is unreadable or a link to the outside."""
    files_below(root / TRACKER, root)
    try:
        return read_regular(root / TRACKER, _MAX_TRACKER).decode(errors="replace").strip()
    except OSError as error:
        hint = "write a file with `release` or an iteration number there"
        raise CkptkitError(f"{root / TRACKER}: {error.strerror}", hint) from error


def _why_not(root: Path) -> str:
    inside = sorted(entry.name for entry in root.iterdir())
    if not inside:
        return "the directory is empty"
    if any(ITERATION.fullmatch(name) or name == "release" for name in inside):
        return f"pass one of the iterations in it, or restore {TRACKER}"
    expected = "pass a directory with config.json and *.safetensors, or with .metadata (Megatron)"
    return other_weights(root) or _hint_below(root) or expected


def tracker_fault(checkpoint: Path) -> str | None:
    """Why a trainer that loads the root would not load this checkpoint in it, or None.

    Source: `read_metadata` and `get_checkpoint_name` in Megatron-LM's `megatron/training/checkpointing.py`.
    """
    tracker = checkpoint.parent / TRACKER
    if not tracker.is_file():
        return f"{tracker} is missing, so Megatron-LM would start from random weights"
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        return f"{tracker} contains {text[:40]!r}, neither release nor an iteration, so Megatron-LM would stop"
    name = text if text == "release" else f"iter_{int(text):07d}"
    return None if name == checkpoint.name else f"{tracker} contains {text}, so Megatron-LM would load {name} instead"
