"""What belongs to an HF checkpoint besides weights: config, tokenizer, templates, code; and how its shards were cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import CkptkitError
from ckptkit.safetensors_io import INDEX, SINGLE, HfCheckpoint, read_json
from ckptkit.specs import TensorSpec

MANIFEST = "ckptkit.json"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".distcp")


def side_files(root: Path) -> Iterator[Path]:
    """Every file of an HF directory that is no weight, relative to it; hidden files and folders are left out."""
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not path.name.endswith(_WEIGHTS) and path.name != MANIFEST:
            yield relative


def copy_side_files(root: Path, target: Path) -> None:
    """Copies them byte for byte."""
    for relative in side_files(root):
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / relative, target / relative)


def write_config(target: Path, config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    """Makes `config.json` true to the weights beside it: their dtype, and whether they are quantized.

    The file is left as it is, byte for byte, when it is true already.
    """
    before = read_json(target / "config.json")
    after = {key: value for key, value in before.items() if key != "quantization_config"}
    if "quantization_config" in config:
        after["quantization_config"] = config["quantization_config"]
    if dtype := main_dtype(specs):
        for key in [key for key in ("dtype", "torch_dtype") if key in before] or ["dtype"]:
            after[key] = dtype
    if after != before:
        (target / "config.json").write_text(json.dumps(after, indent=2) + "\n")


def main_dtype(specs: Mapping[str, TensorSpec]) -> str | None:
    """The floating dtype that most bytes are in, spelled as a config does; None when there is none."""
    sizes: dict[torch.dtype, int] = {}
    for spec in specs.values():
        if spec.dtype in (torch.float32, torch.bfloat16, torch.float16):
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.") if sizes else None


def write_manifest(target: Path, command: list[str], source: Path, layout: Mapping[str, list[str]]) -> None:
    """`ckptkit.json`: which version wrote this, from what, and which HF tensor stands in which HF shard."""
    content = {"schema": "ckptkit-manifest/1", "version": version("ckptkit"), "command": command, "source": source.name, "hf_layout": layout}
    (target / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def reference_layout(hf: Path, manifest: Path) -> dict[str, list[str]] | None:
    """How the release cut its shards: from the shards in `hf` when it has any, else from the manifest; None when neither tells."""
    if (hf / INDEX).exists() or (hf / SINGLE).exists():
        return HfCheckpoint(hf).layout
    if not manifest.exists():
        return None
    layout = read_json(manifest).get("hf_layout")
    if not isinstance(layout, dict):
        raise CkptkitError(f"{manifest} has no hf_layout", "name the HF directory with --hf")
    return {str(file): [str(name) for name in names] for file, names in layout.items()}


def layout_for(checkpoint: Checkpoint, layout: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """`layout` if it names exactly the tensors of `checkpoint`. Raises CkptkitError otherwise."""
    names = [name for file in layout.values() for name in file]
    if differ := sorted(set(names) ^ set(checkpoint.specs)):
        raise CkptkitError(f"the shards of the reference hold other tensors than this model: {differ[:5]}", "name the right HF directory with --hf")
    return dict(layout)
