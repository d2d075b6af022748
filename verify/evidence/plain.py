"""Opens checkpoints as plain weights, whether or not they are quantized, and Megatron's under HF names."""

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
from ckptkit.core.plan import Joined, Step, View
from ckptkit.formats.deltas import open_deltas
from ckptkit.formats.detect import MANIFEST, Location, is_deltas
from ckptkit.formats.hf.reader import HfCheckpoint, has_weights
from ckptkit.formats.hf.side_files import is_quantized, stored_layout
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.storage.directory import Directory


def open_plain(location: Location, hf: str | Path | Directory | None = None) -> Checkpoint:
    """What was located, under its names on disk: Megatron's tensors, or HF as `plain`.

    `hf`: the config of a Megatron checkpoint that has none beside it, or the base of deltas. Raises CkptkitError.
    """
    if location.is_megatron:
        return open_megatron(location, hf)
    return plain(location.path if location.is_deltas else location.directory, hf)


def plain(path: Path | Directory, base: str | Path | Directory | None = None) -> HfCheckpoint | View:
    """The checkpoint, or the newest version of deltas against `base`; a quantized one as what it dequantizes to.

    Raises CkptkitError as `refuse_foreign` and `ckptkit.quant.formats.dequantize.dequantized`.
    """
    source = open_deltas(path, base) if isinstance(path, Path) and is_deltas(path) else HfCheckpoint(path)
    refuse_foreign(source.specs, path)
    refuse_declared_format(source.config, path)
    return _dequantized(source, str(path)) if is_quantized(source.config) else source


def reference_of(source: TorchDistCheckpoint | LegacyCheckpoint) -> HfCheckpoint | View | None:
    """The release that gives the config of a Megatron checkpoint; None where only its config and side files are there.

    Raises CkptkitError as `plain`.
    """
    if not has_weights(source.hf_path):
        return None
    reference = plain(source.hf)
    return None if only_passthrough(reference) else reference


def release_of(source: TorchDistCheckpoint | LegacyCheckpoint, root: Path) -> Collection[str]:
    """Names in the release of a Megatron checkpoint: from `reference_of` or the manifest in `root`; else none."""
    if (reference := reference_of(source)) is not None:
        return reference.specs
    layout = stored_layout(root / MANIFEST) or {}
    return {name for names in layout.values() for name in names}


def as_release(
    source: TorchDistCheckpoint | LegacyCheckpoint,
    root: Path,
    release: Collection[str] = (),
    *,
    fused: bool | None = None,
    dtype: str | None = None,
) -> Checkpoint:
    """A Megatron checkpoint under HF names, with what Megatron does not hold from its HF directory or `root`.

    `release`, `fused` and `dtype` as in `to_hf`; fused None: as the release or, without names of it, the model's own
    class has its experts. Raises CkptkitError as `to_hf`.
    """
    if fused is None:
        fused = is_fused(release) or only_fused(source.config)
    view = to_hf(source, str(source.path), fused=fused, dtype=dtype, release=release)
    untouched = passthrough_beside(source, source.hf, root, plain)
    return Joined(view, untouched) if untouched else view


def comparable(source: Checkpoint, checkpoint: Checkpoint) -> Checkpoint:
    """A source for another quantized checkpoint: as it is stored where both have the same format, else dequantized.

    Weights that both store in parts of the same names, dtypes and shapes stay so either way, to be compared bit for
    bit. Raises CkptkitError as `plain`; a source in a format that is not read stays as it is.
    """
    if not (isinstance(source, HfCheckpoint) and is_quantized(source.config) and is_quantized(checkpoint.config)):
        return source
    from ckptkit.quant.formats.dequantize import format_of, same_format, sound_steps

    try:
        alike = same_format(format_of(source.config), format_of(checkpoint.config))
    except CkptkitError:
        return source
    if alike and source.specs == checkpoint.specs:
        return source
    there, here = ({step.outputs[0].name: step for step in sound_steps(one)} for one in (source, checkpoint))
    kept = {name for name, step in there.items() if _stays(step, here.get(name), source, checkpoint, alike)}
    return _dequantized(source, str(source.root), frozenset(kept)) if kept < there.keys() else source


def _dequantized(source: Checkpoint, where: str, kept: frozenset[str] = frozenset()) -> View:
    from ckptkit.quant.formats.dequantize import dequantized

    return dequantized(source, where, copies_of(adapt_config(source.config, source.specs)), kept)


def _stays(there: Step, here: Step | None, source: Checkpoint, checkpoint: Checkpoint, alike: bool) -> bool:
    """Whether a weight of the source is compared as it is stored. `here`: what dequantizes the checkpoint's."""
    if here is not None:
        return all(checkpoint.specs.get(name) == source.specs[name] for name in there.inputs)
    found = checkpoint.specs.get(there.outputs[0].name)
    return alike and not (found is not None and found.dtype in COMPUTED)
