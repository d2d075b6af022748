"""Finds the HF config of a Megatron checkpoint: in the HF directory named, or in `hf/` beside the iteration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import MissingError
from ckptkit.formats.detect import require_own_files
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.hf.side_files import without_quantization
from ckptkit.storage.directory import Directory, directory


def hf_home(path: Path, hf: str | Path | Directory | None) -> Directory:
    """The HF directory of the iteration at `path`; it need not exist unless it is named. Raises CkptkitError then."""
    if not hf:
        return Directory(path.parent / "hf")
    home = directory(hf)
    require_own_files(home.path)
    if not (home.path / "config.json").exists():
        raise MissingError(f"{home} has no config.json", "name the HF directory of this model with --hf")
    return home


def config_in(home: Path | Directory, path: Path) -> Mapping[str, Any]:
    """The config in `home` for the weights at `path`. Raises CkptkitError when there is none."""
    home = directory(home)
    file = home.path / "config.json"
    if not file.exists():
        raise MissingError(
            f"{path}: the HF config of this model is not stored beside it", "name its HF directory with --hf"
        )
    # Megatron's weights are not quantized, even when the directory named is the INT4 release of the model.
    return without_quantization(read_json(file, home.at("config.json")))
