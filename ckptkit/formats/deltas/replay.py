"""A published version as a full checkpoint: the base with all changes applied, computed as it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ckptkit.core.errors import DamagedError, UsageError
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.formats.deltas.chain import Chain, Version, chain_at, require_sound
from ckptkit.formats.deltas.codec import apply, checksum
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.shard import Shard
from ckptkit.storage.buffers import bytes_of
from ckptkit.storage.directory import Directory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Patch:
    """The change of a tensor from one version to the next."""

    name: str
    version: Version
    shard: Shard

    def apply(self, tensor: Tensor) -> int:
        """Changes a tensor in place, and returns how many of its bytes are others now.

        Raises DamagedError where the change cannot be decoded, or gives other bytes than the writer had.
        """
        stated, where = self.version.metadata, f"{self.shard.path}: {self.name}"
        state = np.frombuffer(bytes_of(tensor), np.uint8)
        try:
            changed = apply(
                stated["delta_encoding"], np.frombuffer(bytes_of(self.shard.read(self.name)), np.uint8), state
            )
        except DamagedError as error:
            raise DamagedError(f"{where}: {error.message}", error.hint) from error
        found, true = checksum(stated["checksum_format"], state), self.shard.metadata[self.name]
        if found != true:
            hint = "it was made against other bytes: name the base of this very run, or replace this version"
            raise DamagedError(f"{where}: the new bytes have the checksum {found}, and the writer's had {true}", hint)
        return changed


def base_of(chain: Chain, given: str | Path | Directory | None) -> HfCheckpoint:
    """The checkpoint to start from: the newest full version, else the one that was given. Raises UsageError without."""
    base = chain.full or given
    if base is None:
        hint = "name the --hf-checkpoint of the run that published them (--hf; of `verify` --source)"
        raise UsageError(f"{chain.root} holds deltas, and nothing to apply them to", hint)
    return HfCheckpoint(base)


def patches_of(chain: Chain) -> Mapping[str, Sequence[Patch]]:
    """The changes of each tensor, in order. Looks at no fault."""
    found: dict[str, list[Patch]] = {}
    for one in chain.deltas:
        for shard in one.shards:
            for name in shard.specs:
                found.setdefault(name, []).append(Patch(name, one, shard))
    return found


def open_deltas(path: Path, base: str | Path | Directory | None) -> View:
    """The version at `path`, or the newest in that directory. Raises CkptkitError where a header shows a fault."""
    chain = chain_at(path)
    source = base_of(chain, base)
    require_sound(chain, source.specs)
    patches = patches_of(chain)
    steps = tuple(_step(source, name, patches.get(name, ())) for names in source.groups for name in names)
    return View(source, Plan(steps, source.specs, where=str(source.root), config=source.config))


def _step(source: HfCheckpoint, name: str, patches: Sequence[Patch]) -> Step:
    spec = source.specs[name]
    return Step((name,), (spec,), partial(_patched, patches), "deltas") if patches else identity(spec)


def _patched(patches: Sequence[Patch], tensors: Sequence[Tensor]) -> list[Tensor]:
    tensor = tensors[0].clone()  # what was read may lie in a reader's memory
    for patch in patches:
        patch.apply(tensor)
    return [tensor]
