"""The verbs as Python functions, for a training script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.app.conversion import ConversionResult, run
from ckptkit.app.inspection import inspect, model_arguments
from ckptkit.app.run_options import run_options
from ckptkit.converters.open import open_checkpoint
from ckptkit.converters.passthrough import FOLDER
from ckptkit.core.errors import UsageError
from ckptkit.formats.detect import locate, refuse_hf, refuse_url
from ckptkit.formats.hf.side_files import MANIFEST
from ckptkit.storage.fingerprint import require_unchanged
from ckptkit.transfer.manifest import check_new_manifest, digests_of, side_file_digests, write_manifest

if TYPE_CHECKING:
    from ckptkit.quant.schemes.registry import Scheme

__all__ = ["convert", "inspect", "make_manifest", "model_arguments", "quantize"]


def convert(src: str | Path, dst: str | Path, *, quantize: Scheme | None = None, **options: Any) -> ConversionResult:
    """Converts an HF directory to Megatron torch_dist, or a Megatron root, `release/` or `iter_*/` to an HF directory.

    With `dialect` a Megatron checkpoint becomes one with the names of that dialect.
    `quantize`, only on the way back, writes quantized weights in the same pass. `options` mean what the fields of
    `ckptkit.app.run_options.RunOptions` mean. Raises CkptkitError for anything wrong with the input; then
    nothing is left.
    """
    return run(run_options("convert", src, dst, quantize, **options))


def quantize(src: str | Path, dst: str | Path, scheme: Scheme | None, **options: Any) -> ConversionResult:
    """Quantizes an HF directory, one tensor an expert. `ckptkit.int4_scheme` makes a scheme of INT4 W4A16,
    `ckptkit.FloatScheme` is one of FP8, MXFP4 and NVFP4; None: a quantized source is dequantized, and no more.

    A quantized source is dequantized first. What a source in the same scheme has packed is packed again, less what the
    scheme ignores, and keeps its scales where they still give its weights and the scheme has the same groups.
    `options` and errors are those of `convert`, less `hf`, `dtype`, `dialect` and `unwitnessed`.
    """
    return run(run_options("quantize", src, dst, scheme, **options))


def make_manifest(
    path: str | Path, output: str | Path | None = None, *, hf: str | Path | None = None, workers: int | None = None
) -> Path:
    """Writes the manifest of a checkpoint, HF or Megatron, to `output` or `ckptkit.json` at its root. Returns its path.

    Raises CkptkitError where a file is there, which `verify` compares with, and where the checkpoint cannot be read.
    """
    if hf:
        refuse_url(hf)
    location = locate(path)
    if location.is_hf:
        refuse_hf(hf, path)
    if location.is_deltas:
        raise UsageError(
            f"{path} holds deltas, which have checksums of their own", "convert them, and digest the result"
        )
    target = Path(output) if output else location.root / MANIFEST
    check_new_manifest(target, path)
    with require_unchanged([location.path]):
        tensors = digests_of(open_checkpoint(path, hf=hf), workers)
        files = side_file_digests(location, [location.root / FOLDER])
    write_manifest(target, ["ckptkit", "manifest", str(path)], tensors, files, {})
    return target
