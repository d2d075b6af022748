"""The verbs that write checkpoints: `convert` and `quantize`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckptkit.app.cli import options as common
from ckptkit.app.cli.output import echo, echo_json, end
from ckptkit.app.cli.verb import Verb
from ckptkit.app.option import option
from ckptkit.app.run_options import PATH_OR_URL, RunOptions, rows, run_options
from ckptkit.core.progress import closing, phase, size
from ckptkit.formats.detect import is_deltas, locate
from ckptkit.quant.ignore.readers import ALL_READERS
from ckptkit.quant.schemes.registry import DEFAULT, NAMES, UNQUANTIZED, options_of_others, scheme_module
from ckptkit.storage.url import is_url

if TYPE_CHECKING:
    from ckptkit.app.conversion import ConversionResult
    from ckptkit.quant.schemes.registry import Scheme


@click.command(cls=Verb, short_help="Convert HF to Megatron, or Megatron to HF.")
@click.argument("src", type=PATH_OR_URL)
@click.argument("dst", type=PATH_OR_URL)
@rows(group="converting")
@option("--quantize", "quantization", type=click.Choice(NAMES), help="Megatron -> quantized HF in one pass.")
@common.quantizing
@common.writing
@common.as_json
def convert(src: str | Path, dst: str | Path, quantization: str | None, as_json: bool, **options: Any) -> None:
    """Convert SRC to DST. An HF directory becomes Megatron torch_dist; a Megatron root, release/ or iter_*/ becomes HF.

    An HF directory may be at a URL: s3://, gs://, hf://. A quantized release (FP8, MXFP4, INT4) is dequantized on the
    way to Megatron.

    With --dialect a Megatron checkpoint becomes a Megatron checkpoint with those names. With --merge an adapter is
    merged into SRC, in float32 and rounded once, and DST is HF.
    """
    _check_paths(src, dst, options)
    scheme = _scheme(quantization or UNQUANTIZED, options, options["like"])
    _run(run_options("convert", src, dst, scheme, **options), as_json)


@click.command(cls=Verb, short_help="Quantize HF to INT4, FP8, MXFP4 or NVFP4.")
@click.argument("src", type=PATH_OR_URL)
@click.argument("dst", type=PATH_OR_URL)
@option(
    "--scheme",
    default=DEFAULT,
    show_default=True,
    type=click.Choice((*NAMES, UNQUANTIZED)),
    help="w4a16: INT4 in groups (compressed-tensors pack-quantized); fp8-block: FP8 in blocks of 128 x 128; "
    "fp8-channel: FP8 with one scale per row; mxfp8: FP8 with one power-of-two scale per 32 weights; mxfp4: 4-bit E2M1 "
    "with the same scales (compressed-tensors mxfp4-pack-quantized); nvfp4: 4-bit E2M1 with an FP8 scale per 16 "
    "weights and one per layer, weights only; none: dequantize a release to BF16, or to the dtype of INT4's scales.",
)
@common.quantizing
@common.writing
@common.as_json
def quantize(src: str | Path, dst: str | Path, scheme: str, as_json: bool, **options: Any) -> None:
    """Quantize the HF checkpoint SRC to DST, to INT4 W4A16 or another --scheme. --scheme none dequantizes it.

    Each may be at a URL: s3://, gs://, hf://. A quantized release (FP8, MXFP4, INT4) is dequantized first; an INT4
    release keeps its scales if they still produce its weights.
    """
    _check_paths(src, dst, options)
    chosen = _scheme(scheme, options, options["like"] or src)
    _run(run_options("quantize", src, dst, chosen, **options), as_json)


def _check_paths(src: str | Path, dst: str | Path, options: Mapping[str, Any]) -> None:
    """Raises CkptkitError, before torch is imported, for a source without a checkpoint or an invalid destination."""
    from ckptkit.transfer.destination import check_destination

    if is_url(src):
        return
    location = locate(src)
    if not is_url(dst) and not options["resume"]:
        check_destination(Path(dst), [location.path], overwrite=options["overwrite"])


def _scheme(name: str, options: dict[str, Any], reference: str | Path | None) -> Scheme | None:
    """The scheme, with defaults from `reference`. Removes its options. Raises click.UsageError for those of others."""
    context = click.get_current_context()
    for other in options_of_others(name):
        if context.get_parameter_source(other) is ParameterSource.COMMANDLINE:
            spelled = f"--{other.replace('_', '-')}"
            raise click.UsageError(f"{spelled} has no effect with --scheme {name}: remove it", context)
        options.pop(other)
    if name == UNQUANTIZED:
        return None
    with phase("loading ckptkit and torch"):
        return scheme_module(name).from_options(name, options, reference)


def _run(options: RunOptions, as_json: bool) -> None:
    with phase("loading ckptkit and torch"):
        from ckptkit.app.conversion import run

    result = run(options)
    if as_json:
        forecast = result.forecast and asdict(result.forecast)
        packed = result.packed and asdict(result.packed)
        echo_json({**vars(result), "layout": dict(result.layout), "forecast": forecast, "packed": packed})
    else:
        _print_result(result)
    if options.dry_run:
        end(f"planned {result.tensors} tensors", as_json)
        return
    source = (options.hf or "BASE") if result.format == "adapter" else options.src
    words = ["ckptkit", "verify", str(options.dst), "--source", source]
    words += ["--hf", options.hf] if options.hf and is_deltas(Path(options.src)) else []
    words += ["--adapter", options.merge] if options.merge else []
    words += common.reader_words(options.readers) if set(options.readers) != set(ALL_READERS) else []
    done = "nothing was left to write" if result.was_whole else f"wrote {size(result.bytes)}"
    closing(done, next_step=None if is_url(options.dst) or is_url(options.src) else shlex.join(words))


def _print_result(result: ConversionResult) -> None:
    for note in result.notes:
        echo(f"note: {note}", err=True)
    total = f"{result.tensors} tensors, {size(result.bytes)}"
    if result.dequantized:
        total += f", dequantized from {result.dequantized}"
    if result.was_whole:
        echo(f"{result.destination} ({result.format}) was already complete: {total}", *_packed(result))
        echo("all files are complete: side files by their bytes, weights by their sizes; no weight was read")
        return
    if result.forecast is None:
        echo(f"{result.destination} ({result.format}): {total}", *_packed(result))
        return
    from ckptkit.app.forecast import lines

    echo(f"would write {result.destination} ({result.format}): {total}")
    for name in result.names:
        echo(f"  {name}")
    for file, names in result.layout.items():
        echo(f"  {file}: {len(names)} tensors")
    echo(*_packed(result), *lines(result.forecast))


def _packed(result: ConversionResult) -> list[str]:
    if result.packed is None:
        return []
    from ckptkit.app.packing_summary import lines

    return lines(result.packed)
