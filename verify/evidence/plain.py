"""Opens an HF directory as plain weights, whether or not it is a quantized release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Step, View
from ckptkit.formats.deltas.replay import open_deltas
from ckptkit.formats.detect import is_deltas
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.side_files import is_quantized
from ckptkit.storage.directory import Directory
from converters.foreign import refuse_foreign, refuse_stated
from converters.planner import copies_of
from converters.stored import as_stored


def plain(path: Path | Directory, base: Path | None = None) -> HfCheckpoint | View:
    """The checkpoint, or the newest version of deltas against `base`; a quantized one as what it dequantizes to.

    Raises CkptkitError as `refuse_foreign` and `quant.formats.dequantize.dequantized`.
    """
    source = open_deltas(path, base) if isinstance(path, Path) and is_deltas(path) else HfCheckpoint(path)
    refuse_foreign(source.specs, path)
    refuse_stated(source.config, path)
    return _dequantized(source, str(path)) if is_quantized(source.config) else source


def comparable(source: Checkpoint, checkpoint: Checkpoint) -> Checkpoint:
    """A source for another quantized checkpoint: as it is stored where both have the same format, else dequantized.

    Weights that both store in parts of the same names, dtypes and shapes stay so either way, to be compared bit for
    bit. Raises CkptkitError as `plain`; a source in a format that is not read stays as it is.
    """
    if not (isinstance(source, HfCheckpoint) and is_quantized(source.config) and is_quantized(checkpoint.config)):
        return source
    from quant.formats.dequantize import format_of, same_format

    try:
        alike = same_format(format_of(source.config), format_of(checkpoint.config))
    except CkptkitError:
        return source
    if alike and source.specs == checkpoint.specs:
        return source
    there, here = ({step.outputs[0].name: step for step in _steps(one)} for one in (source, checkpoint))
    kept = {name for name, step in there.items() if _stays(step, here.get(name), source, checkpoint, alike)}
    return _dequantized(source, str(source.root), frozenset(kept)) if kept < there.keys() else source


def _dequantized(source: Checkpoint, where: str, kept: frozenset[str] = frozenset()) -> View:
    from quant.formats.dequantize import dequantized

    return dequantized(source, where, copies_of(as_stored(source.config, source.specs)), kept)


def _steps(checkpoint: Checkpoint) -> Iterator[Step]:
    """What dequantizes each weight whose parts fit."""
    from quant.formats.dequantize import sound_steps

    return sound_steps(checkpoint)


def _stays(there: Step, here: Step | None, source: Checkpoint, checkpoint: Checkpoint, alike: bool) -> bool:
    """Whether a weight of the source is compared as it is stored. `here`: what dequantizes the checkpoint's."""
    if here is not None:
        return all(checkpoint.specs.get(name) == source.specs[name] for name in there.inputs)
    found = checkpoint.specs.get(there.outputs[0].name)
    return alike and not (found is not None and found.dtype in COMPUTED)
