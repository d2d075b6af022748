"""Keeps tensors that no Megatron language model holds (a vision tower) beside its weights, untouched."""

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
    """Names of these tensors, by what the family says."""
    family = family_of(source.config)
    return [name for name in source.specs if family.carries(name)]


def only_passthrough(source: Checkpoint) -> bool:
    """Whether a checkpoint has nothing else: a directory with the vision tower of a release, say."""
    return len(passthrough_names(source)) == len(source.specs)


def passthrough_of(source: Checkpoint, where: str) -> View | None:
    """These tensors as a checkpoint of their own; None when there are none."""
    names = passthrough_names(source)
    plan = Plan(tuple(identity(source.specs[name]) for name in names), names, where=where, config=source.config)
    return View(source, plan) if names else None


def passthrough_beside(
    source: Checkpoint, hf: Path | Directory, root: Path, opened: Callable[[Directory], Checkpoint]
) -> View | None:
    """Passthrough tensors of a Megatron checkpoint, from `hf` if that has weights, else from `carried/` in `root`.

    `opened` opens the HF directory, which may be quantized.
    """
    family = family_of(source.config)
    if not family.carried and not family.carried_ends:
        return None
    folder = next((found for found in (directory(hf), Directory(root / FOLDER)) if has_weights(found.path)), None)
    return passthrough_of(opened(folder), str(folder)) if folder else None


def lost_towers(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Names of what the config's class has beside the language model and `names` lack.

    `model.visual.*` where no tensor of it is there; else the Linear layers of a block of the tower that are not.
    """
    family = family_of(config)
    towers = family.towers(config)
    lost = [f"{tower}*" for tower in towers if not any(name.startswith(tower) for name in names)]
    return lost or list(_lost_blocks(config, towers, names))


def _lost_blocks(config: Mapping[str, Any], towers: tuple[str, ...], names: Collection[str]) -> Iterator[str]:
    """Linear layers of numbered blocks that are not stored, where others that are spelled alike up to the number are.

    A tower may be spelled in several ways, of which a checkpoint has one.
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
    """Raises CkptkitError where an HF checkpoint of these names would lack a vision tower that its class has."""
    if lost := lost_towers(config, names):
        name = family_of(config).class_of(config)
        raise CkptkitError(
            f"{where} has no {summarize(lost)}, which {name} of config.json has: Megatron does not hold it, and "
            "nothing beside the checkpoint does; engines would leave it random",
            "name with --hf the release with its weights, or a directory with config.json and a file of these tensors",
        )
