"""Opens checkpoints as plain weights: dequantizes, and gives Megatron tensors HF names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ckptkit.converters.experts import is_fused, only_fused
from ckptkit.converters.foreign import refuse_declared_format, refuse_foreign
from ckptkit.converters.megatron.legacy import LegacyCheckpoint
from ckptkit.converters.open import open_megatron
from ckptkit.converters.passthrough import only_passthrough, passthrough_beside
from ckptkit.converters.planner import copies_of, to_hf
from ckptkit.converters.stored import adapt_config
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Joined, View
from ckptkit.formats.deltas import open_deltas
from ckptkit.formats.detect import MANIFEST, Location, is_deltas
from ckptkit.formats.hf.reader import HfCheckpoint, has_weights
from ckptkit.formats.hf.side_files import is_quantized, stored_layout
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.storage.directory import Directory


def open_plain(location: Location, hf: str | Path | Directory | None = None) -> Checkpoint:
    """Opens a checkpoint under its names on disk; `hf` is the config, or the base of deltas. Raises CkptkitError."""
    if location.kind == "megatron":
        return open_megatron(location, hf)
    return plain(location.path if location.kind == "deltas" else location.directory, hf)


def plain(path: Path | Directory, base: str | Path | Directory | None = None) -> HfCheckpoint | View:
    """Opens HF weights, or the newest version of deltas against `base`, dequantized. Raises CkptkitError."""
    source = open_deltas(path, base) if isinstance(path, Path) and is_deltas(path) else HfCheckpoint(path)
    refuse_foreign(source.specs, path)
    refuse_declared_format(source.config, path)
    return _dequantized(source, str(path)) if is_quantized(source.config) else source


def reference_of(source: TorchDistCheckpoint | LegacyCheckpoint) -> HfCheckpoint | View | None:
    """The HF release of a Megatron checkpoint, or None if only its config and side files exist. Raises as `plain`."""
    if not has_weights(source.hf_path):
        return None
    reference = plain(source.hf)
    return None if only_passthrough(reference) else reference


def release_of(source: TorchDistCheckpoint | LegacyCheckpoint, root: Path) -> Collection[str]:
    """Names in the release of a Megatron checkpoint, by `reference_of` or the manifest in `root`; may be empty."""
    if (reference := reference_of(source)) is not None:
        return reference.specs
    return {name for names in (stored_layout(root / MANIFEST) or {}).values() for name in names}


def as_release(
    source: TorchDistCheckpoint | LegacyCheckpoint,
    root: Path,
    release: Collection[str] = (),
    *,
    fused: bool | None = None,
    dtype: str | None = None,
) -> Checkpoint:
    """A Megatron checkpoint under HF names (as `to_hf`), with tensors that it lacks from its HF directory or `root`."""
    if fused is None:  # as the release, else as the model's own class
        fused = is_fused(release) or only_fused(source.config)
    view = to_hf(source, str(source.path), fused=fused, dtype=dtype, release=release)
    untouched = passthrough_beside(source, source.hf, root, plain)
    return Joined(view, untouched) if untouched else view


def comparable(source: Checkpoint, checkpoint: Checkpoint) -> Checkpoint:
    """A source with those weights dequantized that a quantized checkpoint stores differently. Raises CkptkitError."""
    if not (isinstance(source, HfCheckpoint) and is_quantized(source.config) and is_quantized(checkpoint.config)):
        return source
    from ckptkit.quant.formats.dequantize import format_of, same_format, sound_steps

    try:
        is_same_format = same_format(format_of(source.config), format_of(checkpoint.config))
    except CkptkitError:  # an unsupported format
        return source
    if is_same_format and source.specs == checkpoint.specs:
        return source
    theirs, ours = ({step.outputs[0].name: step for step in sound_steps(one)} for one in (source, checkpoint))

    def is_kept(name: str) -> bool:
        if name in ours:
            return all(checkpoint.specs.get(part) == source.specs[part] for part in theirs[name].inputs)
        spec = checkpoint.specs.get(name)
        return is_same_format and not (spec is not None and spec.dtype in COMPUTED)

    kept = frozenset(filter(is_kept, theirs))
    return _dequantized(source, str(source.root), kept) if kept < theirs.keys() else source


def _dequantized(source: Checkpoint, where: str, kept: frozenset[str] = frozenset()) -> View:
    from ckptkit.quant.formats.dequantize import dequantized

    return dequantized(source, where, copies_of(adapt_config(source.config, source.specs)), kept)
