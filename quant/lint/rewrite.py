"""Writes a list of unquantized modules into the configs of a checkpoint, under the keys that its readers read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptkit.formats.hf.reader import MODELOPT_CONFIG, read_json
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.storage.whole import write_whole
from quant.lint.low_precision import WRITTEN, LowPrecisionList
from quant.lists.table import KEYS


def write_list(subject: LowPrecisionList, entries: Sequence[str]) -> None:
    """Writes `entries` into config.json and hf_quant_config.json, as far as they are there."""
    config = read_json(subject.path / "config.json")
    if isinstance(content := quantization_of(config), dict):
        for key in KEYS[subject.method]:
            content.pop(key, None)
        content.update((key, list(entries)) for key in WRITTEN.get(subject.method, ("ignore",)))
        rewrite(subject.path / "config.json", config)
    if (other := subject.path / MODELOPT_CONFIG).exists():
        config = read_json(other)
        nested = config.get("quantization")
        (nested if isinstance(nested, dict) else config)["exclude_modules"] = list(entries)
        rewrite(other, config)


def rewrite(file: Path, config: Mapping[str, Any]) -> None:
    """Replaces a JSON file; keeps the old one as FILE.orig unless that exists already."""
    original = file.with_name(f"{file.name}.orig")
    if not original.exists():
        write_whole(original, file.read_bytes())
    write_whole(file, json.dumps(config, indent=2) + "\n")
