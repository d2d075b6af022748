"""The verbs as Python functions, for a training script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.app.conversion import ConversionResult, run
from ckptkit.app.inspection import inspect, model_arguments
from ckptkit.app.run_options import RunOptions, run_options
from ckptkit.converters.open import open_checkpoint
from ckptkit.converters.passthrough import FOLDER
from ckptkit.core.errors import UsageError
from ckptkit.core.signature import public
from ckptkit.formats.detect import locate, refuse_hf, refuse_url
from ckptkit.formats.hf.side_files import MANIFEST
from ckptkit.quant.schemes.registry import DEFAULT
from ckptkit.storage.fingerprint import require_unchanged
from ckptkit.transfer.manifest import check_new_manifest, digests_of, side_file_digests, write_manifest

if TYPE_CHECKING:
    from ckptkit.quant.schemes.registry import Scheme

__all__ = ["convert", "inspect", "make_manifest", "model_arguments", "quantize"]


@public(RunOptions, hidden=("scheme",))
def convert(
    src: str | Path, dst: str | Path, *, quantize: Scheme | str | None = None, **options: Any
) -> ConversionResult:
    """Converts an HF directory to Megatron torch_dist, or a Megatron root, `release/` or `iter_*/` to an HF directory.

    With `dialect`, a Megatron checkpoint is converted to the names of that dialect. `quantize`: the scheme for weights
    from Megatron, in the same pass, as in `ckptkit.quantize`. Raises CkptkitError for invalid input, and then leaves
    no output.
    """
    return run(run_options("convert", src, dst, quantize, **options))


@public(RunOptions, hidden=("hf", "merge", "dtype", "dialect", "unwitnessed"))
def quantize(
    src: str | Path, dst: str | Path, scheme: Scheme | str | None = DEFAULT, **options: Any
) -> ConversionResult:
    """Quantizes an HF directory that has one tensor per expert, or only dequantizes it if `scheme` is None.

    `scheme`: a name (w4a16, fp8-block, fp8-channel, mxfp8, mxfp4, nvfp4), or one with options: `ckptkit.int4_scheme`
    makes it for INT4 W4A16, and `ckptkit.FloatScheme` is one for the others. A quantized source is dequantized first. A
    source in the same scheme has its packed tensors packed again, except those that the scheme ignores; scales are kept
    if they still produce the weights and the scheme has the same groups. Raises CkptkitError for invalid input, and
    then leaves no output.
    """
    return run(run_options("quantize", src, dst, scheme, **options))


@public()
def make_manifest(
    path: str | Path, output: str | Path | None = None, *, hf: str | Path | None = None, workers: int | None = None
) -> Path:
    """Writes a manifest to `output`, or to `ckptkit.json` at the root. Returns its path. Raises CkptkitError."""
    if hf:
        refuse_url(hf)
    location = locate(path)
    if location.kind == "hf":
        refuse_hf(hf, path)
    if location.kind == "deltas":
        raise UsageError(f"{path} has deltas, which include checksums", "convert them, and digest the result")
    target = Path(output) if output else location.root / MANIFEST
    check_new_manifest(target, path)
    with require_unchanged([location.path]):
        tensors = digests_of(open_checkpoint(path, hf=hf), workers)
        files = side_file_digests(location, [location.root / FOLDER])
    write_manifest(target, ["ckptkit", "manifest", str(path)], tensors, files, {})
    return target
