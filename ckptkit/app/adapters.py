"""Writes the LoRA adapters of a Megatron run as PEFT has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ckptkit.app.run_options import RunOptions, Sources
from ckptkit.core.errors import UsageError
from ckptkit.core.plan import View
from ckptkit.formats.detect import Location
from ckptkit.formats.hf.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.transfer.destination import new_directory
from converters.megatron.run_config import peft_settings
from converters.megatron_adapter import as_peft, only_adapters


def adapters_at(options: RunOptions, location: Location, sources: Sources) -> View | None:
    """The adapters of a Megatron checkpoint that holds nothing else, under PEFT's names; None of any other.

    Raises UsageError for options that do not go with them, and CkptkitError as `as_peft`.
    """
    if not location.is_megatron or location.legacy or (settings := peft_settings(location.path)) is None:
        return None
    source = TorchDistCheckpoint(location.path, hf=sources[options.hf] if options.hf else None)
    if not only_adapters(source.specs):
        return None
    own = RunOptions(options.verb, options.src, options.dst, options.hf)
    if (
        not isinstance(options.dst, Path)
        or replace(own, overwrite=options.overwrite, dry_run=options.dry_run) != options
    ):
        message = f"{options.src} holds LoRA adapters alone, which are written as PEFT has them to a local disk"
        raise UsageError(message, "give --hf BASE and no other option; `--merge DST` merges them after that")
    return as_peft(source, settings, str(location.path))


def write_adapters(options: RunOptions, view: View) -> None:
    """Writes adapter_config.json and adapter_model.safetensors."""
    from safetensors.torch import save_file

    assert isinstance(options.dst, Path)
    with new_directory(options.dst, {}, overwrite=options.overwrite, resume=False) as (partial, _):
        save_file(view.read(list(view.specs)), partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(dict(view.config), indent=2) + "\n")
