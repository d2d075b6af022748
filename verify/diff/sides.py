"""Opens two checkpoints of any formats under common tensor names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.converters.megatron.legacy import LegacyCheckpoint
from ckptkit.converters.planner import rules_for_names
from ckptkit.converters.registry import family_of, named_family_of
from ckptkit.converters.stored import adapt_config
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import Location, locate, refuse_hf
from ckptkit.formats.hf.reader import has_weights
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.checks.config.config import config_differences, describe_model, is_another_model, plain_differences
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.evidence.reading import as_hf_view
from ckptkit.verify.evidence.side.compare import code_differences, side_differences
from ckptkit.verify.evidence.side_files import SideFiles
from ckptkit.verify.opened import open_location

_LISTED = 5  # settings of a config


@dataclass(frozen=True)
class Sides:
    """Both checkpoints, under common names."""

    a: Checkpoint
    b: Checkpoint
    formats: tuple[str, str]
    notes: tuple[str, ...]  # on tensors and files that are not compared
    files: tuple[str, ...] = ()  # differences of config.json and the other files next to the weights


def opened(a: str | Path, b: str | Path, hf: str | Path | None = None) -> Sides:
    """Opens and dequantizes both checkpoints; `hf` is the config of a Megatron one without. Raises CkptkitError."""
    places = locate(a), locate(b)
    if places[0].kind == "hf" and places[1].kind == "hf":
        refuse_hf(hf, a)
    both = [open_location(place, _config_for(place, hf, other)) for place, other in (places, places[::-1])]
    stored = [one.checkpoint for one in both]
    (left, right), notes = stored, list[str]()
    try:
        left, right = as_hf_view(left, places[0].path, right.specs), as_hf_view(right, places[1].path, left.specs)
    except CkptkitError as error:
        if places[0].kind != places[1].kind:
            raise
        notes = [f"tensors are compared by their names on disk, since no common names are known: {error.message}"]
    files, more = compare_files(config_or_empty(stored[0]), config_or_empty(stored[1]), *places)
    notes += [*_padding(stored, places), *_borrowed(stored, [left, right], places), *more]
    return Sides(left, right, (both[0].words, both[1].words), tuple(notes), tuple(files))


def _config_for(place: Location, hf: str | Path | None, other: Location) -> str | Path | None:
    """The config or base of deltas of a side: a Megatron side without a config uses that of an HF side."""
    if hf or place.kind != "megatron" or other.kind != "hf" or (place.root / "hf" / "config.json").exists():
        return hf
    return other.path


def _padding(stored: list[Checkpoint], places: tuple[Location, Location]) -> Iterator[str]:
    """Yields a note for a Megatron side with a padded vocabulary: HF names have no padding."""
    for checkpoint, place in zip(stored, places, strict=True):
        config = config_or_empty(checkpoint)
        if place.kind != "megatron" or not supported(config):
            continue
        rules = rules_for_names(adapt_config(config, checkpoint.specs), checkpoint.specs)
        vocab = [rule for rule in rules if rule.mapping.vocab and rule.megatron in checkpoint.specs]
        rows = {checkpoint.specs[rule.megatron].shape[0] - rule.megatron_shape[0] for rule in vocab}
        if any(rows):
            yield f"{max(rows)} rows that pad the vocabulary of {place.path} are not compared"


def _borrowed(stored: list[Checkpoint], sides: list[Checkpoint], places: tuple[Location, Location]) -> Iterator[str]:
    """Yields a note for tensors that Megatron lacks (a vision tower) and that come from another directory."""
    for checkpoint, side, place in zip(stored, sides, places, strict=True):
        if not isinstance(checkpoint, (TorchDistCheckpoint, LegacyCheckpoint)) or side is checkpoint:
            continue
        hf, config = checkpoint.hf_path, config_or_empty(checkpoint)
        if not has_weights(hf) or hf.absolute().is_relative_to(place.root):
            continue
        if names := [name for name in side.specs if family_of(config).passes_through(name)]:
            yield f"{summarize(names, 3)}: not compared, since {place.path} lacks them and they would come from {hf}"


def config_or_empty(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The HF config of a checkpoint; empty for a Megatron one without."""
    try:
        return checkpoint.config
    except CkptkitError:
        return {}


def compare_files(
    a: Mapping[str, Any], b: Mapping[str, Any], place_a: Location, place_b: Location
) -> tuple[list[str], list[str]]:
    """The differences of configs and other files that loaders read, a line each, and notes. Raises CkptkitError."""
    lines, notes = _configs(a, b) if a and b else ([], [])
    sides = [SideFiles.of(place) for place in (place_a, place_b)]
    bare = [name for name, side in zip("AB", sides, strict=True) if not side.loaded - {"config.json"}]
    if bare or sides[0].root.resolve() == sides[1].root.resolve():
        if len(bare) == 1 and place_a.kind == "hf" and place_b.kind == "hf":
            notes.append(f"files were not compared, since {bare[0]} has none next to its weights")
        return lines, notes
    try:
        code = [one for one in code_differences(sides[1], sides[0], "in A") if not one.words.startswith("missing")]
        lines += [f"{one.file} differs in B: {one.words}" for one in code]
        for one in side_differences(sides[0], sides[1], "in B"):
            if not one.file.endswith(".py") or all(other.file != one.file for other in code):
                lines.append(f"{one.file} {'is only in B' if one.words == 'missing' else f'differs: {one.words}'}")
    except CannotCheck as reason:
        notes.append(f"not compared: {reason}")
    return lines, notes


def _configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Differing settings, and a note on those that one side lacks and that have no known default."""
    is_supported = supported(a) and supported(b)
    if is_supported and is_another_model(a, b):
        return [f"config.json differs: {describe_model(a)} and {describe_model(b)}"], []
    differences = (config_differences if is_supported else plain_differences)(a, b, CheckResult("", ""))
    lines = {}
    for severity, ones in by_key((one.severity, one) for one in differences).items():
        more = f" and {len(ones) - _LISTED} more" if ones[_LISTED:] else ""
        listed = (f"{one.name} {_shown(one.here)} and {_shown(one.there)}" for one in ones[:_LISTED])
        lines[severity] = f"config.json differs: {', '.join(listed)}{more}"
    notes = [f"{lines['warning']}, which may be a default that only one file contains"] if "warning" in lines else []
    return [lines["error"]] if "error" in lines else [], notes


def _shown(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else shortened(value)


def supported(config: Mapping[str, Any]) -> bool:
    """Whether the config is of a supported family and complete."""
    try:
        named_family_of(config).read_dims(config)
    except CkptkitError:
        return False
    return True
