"""Opens two checkpoints of any formats under common tensor names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import Location, locate, refuse_hf
from ckptkit.formats.hf.reader import has_weights
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from converters.megatron.legacy import LegacyCheckpoint
from converters.planner import rules_in, tied_head
from converters.registry import family_of
from converters.stored import as_stored
from verify.diff.files import compare_files, supported
from verify.evidence.expected import fp32_names
from verify.evidence.values import as_hf_view
from verify.opened import opened_at


@dataclass(frozen=True)
class Sides:
    """Both checkpoints, under common names."""

    a: Checkpoint
    b: Checkpoint
    formats: tuple[str, str]  # what lies at each path
    notes: tuple[str, ...]  # what is not compared
    files: tuple[str, ...] = ()  # how config.json and the other files next to the weights differ


def opened(a: str | Path, b: str | Path, hf: str | Path | None = None) -> Sides:
    """Opens both, quantized HF weights dequantized. `hf`: the config of a Megatron checkpoint that has none beside it.

    Two checkpoints of one kind (both HF, or both Megatron) that cannot be brought to common HF names keep the names
    that they have on disk, and a note says why. Raises CkptkitError where one cannot be opened, and where HF and
    Megatron cannot be brought together.
    """
    places = locate(a), locate(b)
    if places[0].is_hf and places[1].is_hf:
        refuse_hf(hf, a)
    both = [opened_at(place, _config_for(place, hf, other)) for place, other in (places, places[::-1])]
    stored = [one.checkpoint for one in both]
    sides, why = _under_common_names(stored, places)
    files, more = compare_files(config_or_empty(stored[0]), config_or_empty(stored[1]), *places)
    notes = [*why, *_padding(stored, places), *_borrowed(stored, sides, places), *more]
    return Sides(sides[0], sides[1], (both[0].words, both[1].words), tuple(notes), tuple(files))


def _config_for(place: Location, hf: str | Path | None, other: Location) -> str | Path | None:
    """Where a side's config, or the base of its deltas, is: a Megatron side without one has that of an HF side."""
    if hf or not place.is_megatron or not other.is_hf or (place.root / "hf" / "config.json").exists():
        return hf
    return other.path


def _under_common_names(
    stored: list[Checkpoint], places: tuple[Location, Location]
) -> tuple[list[Checkpoint], list[str]]:
    a, b = stored
    try:
        sides = [as_hf_view(a, places[0].path, b.specs), as_hf_view(b, places[1].path, a.specs)]
    except CkptkitError as error:
        if places[0].kind != places[1].kind:
            raise
        return stored, [f"tensors keep their names on disk, since there are no common ones: {error.message}"]
    return sides, []


def _padding(stored: list[Checkpoint], places: tuple[Location, Location]) -> Iterator[str]:
    """Yields a note for a Megatron side whose vocabulary is padded: the padding has no place under HF names."""
    for checkpoint, place in zip(stored, places, strict=True):
        config = config_or_empty(checkpoint)
        if not place.is_megatron or not supported(config):
            continue
        rules = rules_in(as_stored(config, checkpoint.specs), checkpoint.specs)
        rows = {
            checkpoint.specs[rule.megatron].shape[0] - rule.megatron_shape[0]
            for rule in rules
            if rule.mapping.vocab and rule.megatron in checkpoint.specs
        }
        if any(rows):
            yield f"{max(rows)} rows that pad the vocabulary of {place.path} are not compared"


def _borrowed(stored: list[Checkpoint], sides: list[Checkpoint], places: tuple[Location, Location]) -> Iterator[str]:
    """Yields a note for tensors that Megatron does not hold (a vision tower) and that come from another directory."""
    for checkpoint, side, place in zip(stored, sides, places, strict=True):
        if not isinstance(checkpoint, (TorchDistCheckpoint, LegacyCheckpoint)) or side is checkpoint:
            continue
        hf, config = checkpoint.hf_path, config_or_empty(checkpoint)
        if not has_weights(hf) or hf.absolute().is_relative_to(place.root):
            continue
        if names := [name for name in side.specs if family_of(config).carries(name)]:
            yield f"{summarize(names, 3)}: not in {place.path}, and taken from {hf}, so not compared"


def config_or_empty(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The HF config of a checkpoint; empty where a Megatron one has none, so that its names are those on disk."""
    try:
        return checkpoint.config
    except CkptkitError:
        return {}


def tied_names(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """HF names of the output layer and of the embedding that it repeats; None where they are not tied, or unknown."""
    return tied_head(config) if supported(config) else None


def fp32_state(config: Mapping[str, Any]) -> frozenset[str]:
    """As `fp32_names`; empty also where the config is not of a supported family."""
    return fp32_names(config if supported(config) else None)
