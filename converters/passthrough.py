"""Passes tensors outside Megatron's language model (a vision tower) through unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptkit.converters.registry import family_of
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, View, identity
from ckptkit.core.specs import summarize
from ckptkit.formats.hf.reader import has_weights
from ckptkit.storage.directory import Directory, directory

FOLDER = "carried"  # holds the passthrough tensors of a converted checkpoint
_NUMBERED = re.compile(r"(.*?)\.(\d+)\.")


def passthrough_names(source: Checkpoint) -> list[str]:
    """Names of the tensors that the family passes through."""
    family = family_of(source.config)
    return [name for name in source.specs if family.passes_through(name)]


def only_passthrough(source: Checkpoint) -> bool:
    """Whether a checkpoint has only such tensors, for example the vision tower of a release."""
    return len(passthrough_names(source)) == len(source.specs)


def passthrough_of(source: Checkpoint, where: str) -> View | None:
    """A checkpoint of only these tensors, or None if there are none."""
    names = passthrough_names(source)
    plan = Plan(tuple(identity(source.specs[name]) for name in names), names, where=where, config=source.config)
    return View(source, plan) if names else None


def passthrough_beside(
    source: Checkpoint, hf: Path | Directory, root: Path, opened: Callable[[Directory], Checkpoint]
) -> View | None:
    """Passthrough tensors of a Megatron checkpoint, from `hf` if it has weights, else from `carried/` in `root`.

    `opened` opens an HF directory, which may be quantized.
    """
    family = family_of(source.config)
    if not family.passthrough and not family.passthrough_suffixes:
        return None
    folder = next((one for one in (directory(hf), Directory(root / FOLDER)) if has_weights(one.path)), None)
    return passthrough_of(opened(folder), str(folder)) if folder else None


def lost_towers(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Tensors of the config's class outside the language model that are missing in `names`.

    `model.visual.*` if the complete tower is missing, else the missing Linear layers of its blocks.
    """
    family = family_of(config)
    towers = family.towers(config)
    missing = [f"{tower}*" for tower in towers if not any(name.startswith(tower) for name in names)]
    return missing or list(_find_missing_layers(config, towers, names))


def _find_missing_layers(config: Mapping[str, Any], towers: tuple[str, ...], names: Collection[str]) -> Iterator[str]:
    """Missing Linear layers of numbered blocks, if other blocks with the same spelling are stored.

    The family lists several spellings of a tower; a checkpoint has one of them.
    """
    release = family_of(config).release
    if (
        not towers
        or release is None
        or release.linears_outside is None
        or not isinstance(config.get("vision_config"), Mapping)
    ):
        return
    stored = {name.rpartition(".")[0] for name in names if name.startswith(towers)}
    spelled = {match[1] for match in map(_NUMBERED.match, stored) if match}
    for module in release.linears_outside(config):
        if (match := _NUMBERED.match(module)) and match[1] in spelled and module not in stored:
            yield f"{module}.weight"


def require_towers(config: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Raises CkptkitError if an HF checkpoint with these names would lack its class's vision tower."""
    if missing := lost_towers(config, names):
        name = family_of(config).class_of(config)
        raise CkptkitError(
            f"{where} has no {summarize(missing)}, but {name} in config.json requires these tensors: Megatron does not "
            "store them, and engines would leave them uninitialized",
            "pass --hf DIR with the weights of the release, or with config.json and a file of these tensors",
        )
