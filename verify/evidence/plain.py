"""Opens an HF directory as plain weights, whether or not it is a quantized release."""

from __future__ import annotations

from pathlib import Path

from ckptkit.core.plan import View
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.side_files import is_quantized
from ckptkit.storage.directory import Directory
from converters.foreign import refuse_foreign, refuse_stated
from converters.planner import copies_of
from converters.stored import as_stored


def plain(path: Path | Directory) -> HfCheckpoint | View:
    """The checkpoint, a quantized one as the weights that it dequantizes to.

    Raises CkptkitError as `refuse_foreign` and `quant.formats.dequantize.dequantized`.
    """
    source = HfCheckpoint(path)
    refuse_foreign(source.specs, path)
    refuse_stated(source.config, path)
    if not is_quantized(source.config):
        return source
    from quant.formats.dequantize import dequantized

    return dequantized(source, str(path), copies_of(as_stored(source.config, source.specs)))
