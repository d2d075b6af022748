"""Compares what describes the model next to the tensors of two checkpoints: config.json, tokenizer, templates, code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.formats.detect import Location
from converters.planner import dims_of
from verify.check import Tally
from verify.checks.config.config import (
    ConfigDifference,
    config_differences,
    describe_model,
    is_another_model,
    plain_differences,
)
from verify.evidence.side.compare import code_differences, side_differences
from verify.evidence.side_files import SideFiles
from verify.skip import Unable

_LISTED = 5  # settings of a config


def compare_files(
    a: Mapping[str, Any], b: Mapping[str, Any], place_a: Location, place_b: Location
) -> tuple[list[str], list[str]]:
    """How the configs and the other files that loaders read differ, a line each, and notes of what is not compared.

    A side without any such file but config.json is not compared. Raises CkptkitError for a file that cannot be read.
    """
    found, notes = _configs(a, b) if a and b else ([], [])
    sides = [SideFiles.of(place) for place in (place_a, place_b)]
    bare = [name for name, side in zip("AB", sides, strict=True) if not side.loaded - {"config.json"}]
    if bare or sides[0].root.resolve() == sides[1].root.resolve():
        if len(bare) == 1 and place_a.is_hf and place_b.is_hf:
            notes.append(f"{bare[0]} has no tokenizer and no other file next to its weights, so none is compared")
        return found, notes
    try:
        code = [one for one in code_differences(sides[1], sides[0], "in A") if not one.words.startswith("missing")]
        found += [f"{one.file} differs in B: {one.words}" for one in code]
        for one in side_differences(sides[0], sides[1], "in B"):
            if one.file.endswith(".py") and any(other.file == one.file for other in code):
                continue
            found.append(f"{one.file} {'is only in B' if one.words == 'missing' else f'differs: {one.words}'}")
    except Unable as reason:
        notes.append(f"not compared: {reason}")
    return found, notes


def _configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Settings with two values are a difference; one that a side lacks, of which no default is known, is a note."""
    if supported(a) and supported(b):
        if is_another_model(a, b):
            return [f"config.json differs: {describe_model(a)} and {describe_model(b)}"], []
        differences = list(config_differences(a, b, Tally()))
    else:
        differences = list(plain_differences(a, b, Tally()))
    by_severity: dict[str, list[ConfigDifference]] = defaultdict(list)
    for one in differences:
        by_severity[one.severity].append(one)
    lines = {severity: f"config.json differs: {_listed(ones)}" for severity, ones in by_severity.items()}
    notes = [f"{lines['warning']}, which may be a default that one of them spells out"] if "warning" in lines else []
    return [lines["error"]] if "error" in lines else [], notes


def _listed(differences: list[ConfigDifference]) -> str:
    more = f" and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
    return ", ".join(f"{one.name} {_shown(one.here)} and {_shown(one.there)}" for one in differences[:_LISTED]) + more


def _shown(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else shortened(value)


def supported(config: Mapping[str, Any]) -> bool:
    """Whether the config is of a supported family and complete."""
    try:
        dims_of(config)
    except CkptkitError:
        return False
    return True
