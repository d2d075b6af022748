"""The command line. Exit codes: 0 nothing wrong, 1 findings, 2 bad usage or input, or inconclusive, 130 interrupted."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptkit.app import options as common
from ckptkit.core.allocator import set_up_memory
from ckptkit.core.collector import uncollected
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import json_text, printable
from ckptkit.core.unused import refuse_int4_options
from ckptkit.formats.detect import locate
from ckptkit.storage.readahead import reading_ahead
from quant.selection.readers import ALL_READERS

if TYPE_CHECKING:
    from ckptkit.app.api import Written
    from quant.formats.scheme import QuantScheme
    from verify.report import Report

# Where they are installed transformers imports them, for assisted generation, images and quantizers: seconds for what is not used here.
# Nothing else that it imports needs them; of scipy, which scikit-learn needs and more may, that cannot be said.
_NOT_NEEDED = ("sklearn", "torchao", "torchvision")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckptkit")
@click.option("--debug", is_flag=True, help="Show a traceback when something goes wrong.")
def cli(debug: bool) -> None:
    """Converts HF <-> Megatron checkpoints, quantizes them to INT4, and proves what Megatron and SGLang loaded."""


@cli.command()
@click.argument("src", type=common.PLACE)
@click.argument("dst", type=common.PLACE)
@click.option(
    "--hf", type=common.PLACE, help="HF directory that gives config, tokenizer and shard layout on the way back."
)
@click.option(
    "--dtype", default="auto", show_default=True, type=click.Choice(["auto", "bfloat16", "float16", "float32"])
)
@click.option(
    "--dialect",
    type=click.Choice(["mcore", "slime"]),
    help="Names of Megatron's tensors: megatron-core's own (the default) or slime's modules.",
)
@click.option("--quantize", "quantization", type=click.Choice(["w4a16"]), help="Megatron -> INT4 HF in one pass.")
@common.int4
@common.writing
@common.as_json
def convert(
    src: str | Path,
    dst: str | Path,
    hf: str | Path | None,
    dtype: str,
    dialect: str | None,
    quantization: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SRC to DST. An HF directory becomes Megatron torch_dist; a Megatron root, release/ or iter_*/ becomes HF.

    An HF directory may be at a URL: s3://, gs://, hf://.

    A quantized release (FP8, MXFP4, INT4) is dequantized on the way to Megatron.
    """
    if not quantization:
        refuse_int4_options(common.given(common.INT4))
    _import_less()
    with _only_planning(dry_run):
        from ckptkit.app.api import convert as run

        scheme, rest = _scheme(options, options["like"])
        written = run(
            src,
            dst,
            hf=hf,
            dtype=dtype,
            dialect=dialect,
            quantize=scheme if quantization else None,
            dry_run=dry_run,
            **rest,
        )
        _print_written(written, dry_run, as_json)


@cli.command()
@click.argument("src", type=common.PLACE)
@click.argument("dst", type=common.PLACE)
@common.int4
@common.writing
@common.as_json
def quantize(src: str | Path, dst: str | Path, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Quantize the HF checkpoint SRC to INT4 W4A16 (compressed-tensors pack-quantized) at DST; each may be at a URL: s3://, gs://, hf://.

    A quantized release (FP8, MXFP4, INT4) is dequantized first; an INT4 one keeps its scales where they still give its weights.
    """
    _import_less()
    with _only_planning(dry_run):
        from ckptkit.app.api import quantize as run

        scheme, rest = _scheme(options, options["like"] or src)
        written = run(src, dst, scheme, dry_run=dry_run, **rest)
        _print_written(written, dry_run, as_json)


def _only_planning(dry_run: bool) -> AbstractContextManager[None]:
    """A plan is all there is, and all of it stays until it is printed: no search for what could be thrown away."""
    return uncollected() if dry_run else nullcontext()


def _import_less() -> None:
    for name in _NOT_NEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # Python's own way to say that a module is not there


def _reading(checkpoint: Path, source: Path | None) -> AbstractContextManager[None]:
    """While `verify` is being imported the weights of both sides are read, a file of each in turn, as they will be compared."""
    sides = [_weights(path) for path in (checkpoint, source) if path]
    return reading_ahead([file for files in zip_longest(*sides) for file in files if file])


def _weights(path: Path) -> list[Path]:
    # Why there is no checkpoint here is for the command itself to say.
    with suppress(CkptkitError):
        path = locate(path).path
    return sorted([*path.glob("*.safetensors"), *path.glob("*.distcp")])


_OF_SCHEME = ("group_size", "grid", "asymmetric", "search", "scale_dtype", "ignore")


def _scheme(options: dict[str, Any], reference: str | Path | None) -> tuple[QuantScheme, dict[str, Any]]:
    """The scheme asked for, in which what is not said is as in the INT4 checkpoint at `reference`, if there is one; and the other options."""
    from ckptkit.app.api import int4_scheme
    from ckptkit.app.jobs import DTYPES

    size = options["group_size"]
    scheme = int4_scheme(
        reference,
        group_size="channel" if size == "channel" else int(size) if size else None,
        grid=options["grid"],
        symmetric=False if options["asymmetric"] else None,
        ignore=options["ignore"],
        search=options["search"],
        scale_dtype=DTYPES[options["scale_dtype"]],
    )
    rest = {name: value for name, value in options.items() if name not in _OF_SCHEME}
    return scheme, rest | {"readers": options["readers"] or ALL_READERS}


def _print_written(written: Written, dry_run: bool, as_json: bool) -> None:
    if as_json:
        expected = written.forecast and asdict(written.forecast)
        _echo_json({**vars(written), "layout": dict(written.layout), "forecast": expected})
        return
    from ckptkit.app.forecast import lines

    for note in written.notes:
        _echo(f"note: {note}", err=True)
    size = f"{written.tensors} tensors, {written.bytes / 1e9:.3f} GB" + (
        f", dequantized from {written.dequantized}" if written.dequantized else ""
    )
    if dry_run:
        _echo(f"would write {written.destination} ({written.format}): {size}")
        for name in written.names:
            _echo(f"  {name}")
        for file, names in written.layout.items():
            _echo(f"  {file}: {len(names)} tensors")
        if written.forecast is not None:
            _echo(*lines(written.forecast))
        return
    _echo(f"{written.destination} ({written.format}): {size}")


def _print_arguments(args: Mapping[str, Any], as_json: bool) -> None:
    from converters.megatron.flags import launch_flags

    if as_json:
        _echo_json(dict(args))
        return
    _echo("MODEL_ARGS=(")
    for line in launch_flags(args):
        _echo(f"    {line}")
    _echo(")")


@cli.command()
@click.argument("path", type=common.PLACE)
@click.option(
    "--hf", type=common.PLACE, help="HF directory with the config of a Megatron checkpoint that does not carry it."
)
@click.option(
    "--megatron-args",
    "as_args",
    is_flag=True,
    help="Print the Megatron arguments of the model, as a launch script wants them, and nothing else.",
)
@common.as_json
def inspect(path: str | Path, hf: str | Path | None, as_args: bool, as_json: bool) -> None:
    """Say what lies at PATH: format, sizes, dtypes, configuration, and every tensor with layers and experts folded."""
    from ckptkit.app.api import inspect as run
    from ckptkit.app.api import model_arguments

    if as_args:
        _print_arguments(model_arguments(path, hf=hf), as_json)
        return
    facts = run(path, hf=hf)
    if as_json:
        _echo_json(facts)
        return
    for key, value in facts.items():
        if isinstance(value, list):
            _echo(f"{key}:")
            for line in value:
                _echo(f"  {line}")
        elif isinstance(value, dict):
            _echo(f"{key}: " + ", ".join(f"{name}={_short(one)}" for name, one in value.items()))
        else:
            _echo(f"{key}: {value}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--reader",
    "readers",
    multiple=True,
    type=click.Choice(ALL_READERS),
    help="Who must agree on what is packed. Repeatable. [default: all]",
)
@click.option(
    "--fix",
    is_flag=True,
    help="Write the list that all readers take alike into config.json; the original stays as config.json.orig.",
)
@common.as_json
def lint(path: Path, readers: tuple[str, ...], fix: bool, as_json: bool) -> None:
    """Say how every reader takes the `ignore` list of the INT4 checkpoint at PATH; a lone config.json is enough. Reads no weights."""
    from quant.lint.lint import lint as run
    from quant.lint.text import lines

    report = run(path, readers=readers or None, fix=fix)
    if as_json:
        _echo_json(report.to_json())
    else:
        _echo(*lines(report))
    if report.failed and not report.fixed:
        raise SystemExit(1)


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where to write it. [default: ckptkit.json at the root of PATH]"
)
@click.option(
    "--hf",
    type=click.Path(path_type=Path),
    help="HF directory with the config of a Megatron checkpoint that does not carry it.",
)
@common.workers
def manifest(path: Path, output: Path | None, hf: Path | None, workers: int | None) -> None:
    """Write a digest of every tensor and side file of PATH, HF or Megatron: `verify --manifest` proves a copy with it, with no source."""
    with _reading(path, None):
        from ckptkit.app.api import make_manifest as run

        written = run(path, output, hf=hf, workers=workers)
    _echo(str(written))


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--source", type=click.Path(path_type=Path), help="What it was made from, HF or Megatron: every value is compared."
)
@click.option(
    "--hf",
    type=click.Path(path_type=Path),
    help="HF directory with the config of a Megatron checkpoint that does not carry it.",
)
@click.option(
    "--against-megatron",
    is_flag=True,
    help="Load it into real Megatron, one process a rank, and compare every parameter.",
)
@click.option(
    "--against-sglang", is_flag=True, help="Load it into the real SGLang model class and compare every parameter."
)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    help="A ckptkit.json kept apart: every tensor and side file is compared with its digest.",
)
@common.parallel
@click.option(
    "--etp", type=click.IntRange(1), help="Tensor parallel size inside experts. [default: tp, or 1 with --ep]"
)
@click.option("--vpp", default=1, show_default=True, type=click.IntRange(1), help="Virtual pipeline stages a rank.")
@click.option(
    "--reader",
    "readers",
    multiple=True,
    type=click.Choice(ALL_READERS),
    help="Whose reading of an INT4 checkpoint's `ignore` list counts. Repeatable. [default: sglang, slime and miles]",
)
@common.ray
@common.reports
@click.option("--strict", is_flag=True, help="Exit 1 when a check was skipped.")
@common.as_json
def verify(
    checkpoint: Path,
    source: Path | None,
    hf: Path | None,
    against_megatron: bool,
    against_sglang: bool,
    manifest: Path | None,
    tp: int,
    pp: int,
    ep: int,
    etp: int | None,
    vpp: int,
    readers: tuple[str, ...],
    ray: str | None,
    reports: tuple[Path, ...],
    strict: bool,
    as_json: bool,
) -> None:
    """Prove CHECKPOINT: files, values, quantization, and what real Megatron and real SGLang make of it."""
    against = frozenset(name for name, wanted in (("megatron", against_megatron), ("sglang", against_sglang)) if wanted)
    with _reading(checkpoint, source) if ray is None else nullcontext():
        from verify.run import verify as run

        sizes: dict[str, Any] = {"tp": tp, "pp": pp, "ep": ep, "etp": etp, "vpp": vpp}
        report = run(
            checkpoint,
            source,
            hf,
            **sizes,
            against=against,
            command=sys.argv,
            manifest=manifest,
            readers=readers or None,
            ray=ray,
        )
    _print_report(report, as_json, strict, reports)


@cli.command()
@click.option("--hf-checkpoint", type=click.Path(path_type=Path), help="What the rollout engine loads.")
@click.option("--load", type=click.Path(path_type=Path), help="What the trainer loads.")
@click.option("--ref-load", type=click.Path(path_type=Path), help="What the reference model loads.")
@click.option("--ckpt-step", type=click.IntRange(0), help="The iteration to load instead of the latest.")
@common.parallel
@common.reports
@click.option("--strict", is_flag=True, help="Exit 1 when a check was skipped.")
@common.as_json
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- LAUNCH ARGUMENTS]")
def preflight(
    hf_checkpoint: Path | None,
    load: Path | None,
    ref_load: Path | None,
    ckpt_step: int | None,
    tp: int,
    pp: int,
    ep: int,
    reports: tuple[Path, ...],
    strict: bool,
    as_json: bool,
    arguments: tuple[str, ...],
) -> None:
    """Before a training job: which weights each side would really load, and whether they belong together. Reads no weights.

    Of the launch script's own arguments, given behind --, those about parallel sizes and pipeline stages are looked at. Where others
    name a path or a size, as overrides of a configuration do, the report is inconclusive.
    """
    from verify.launch.preflight import preflight as run

    if hf_checkpoint is None and load is None and ref_load is None:
        raise click.UsageError("give at least one of --hf-checkpoint, --load and --ref-load")
    if arguments and not arguments[0].startswith(("-", "+", "~")) and "=" not in arguments[0]:
        raise click.UsageError(f"unexpected argument {arguments[0]!r}; launch arguments come behind --")
    report = run(
        hf_checkpoint=hf_checkpoint,
        load=load,
        ref_load=ref_load,
        ckpt_step=ckpt_step,
        tp=tp,
        pp=pp,
        ep=ep,
        arguments=arguments,
    )
    _print_report(report, as_json, strict, reports)


def _print_report(report: Report, as_json: bool, strict: bool, reports: tuple[Path, ...]) -> None:
    from verify.reports import write_report
    from verify.reports.render import render

    try:
        for path in reports:
            write_report(report, path)
    finally:
        # What was found is said even where the disk is full.
        if as_json:
            _echo_json(report.to_json())
        else:
            render(report)
    skipped = [check.code for check in report.checks if check.status == "skipped"]
    if strict and skipped:
        _echo(f"--strict: skipped {', '.join(skipped)}", err=True)
    if report.status == "failed" or (strict and skipped and report.status == "passed"):
        raise SystemExit(1)
    if report.status == "inconclusive":
        raise SystemExit(2)


@cli.command()
@click.argument("code")
def explain(code: str) -> None:
    """Say what a check looks at, why it matters and what to do about a finding."""
    from verify.explain import explain as run

    _echo(*run(code).split("\n"))


def _echo(*lines: str, err: bool = False) -> None:
    """Prints lines on standard output or standard error. All that this command prints comes through here, `_echo_json` or `verify.reports.render`."""
    click.echo("\n".join(map(printable, lines)), err=err)


def _echo_json(content: Any) -> None:
    click.echo(json_text(content))


def _show(error: click.ClickException) -> None:
    """Says what is wrong with the words of the command line, which a shell may have taken from the names of files."""
    said = printable(error.format_message())
    (click.UsageError(said, error.ctx) if isinstance(error, click.UsageError) else click.ClickException(said)).show()


def main() -> None:
    """Entry point of the `ckptkit` command."""
    debug = "--debug" in sys.argv
    # Headers of large models are a million objects that live to the end: looking through all of them again and again takes half of the time.
    gc.set_threshold(200_000, 10, 10)
    if debug:
        logging.basicConfig()
        logging.getLogger("verify").setLevel(logging.DEBUG)
    set_up_memory()
    try:
        result = cli.main(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.ClickException as error:
        _show(error)
        sys.exit(2)
    except CkptkitError as error:
        _fail(error, debug)
        sys.exit(2)
    except OSError as error:
        _fail(CkptkitError(str(error), "check the path and its permissions") if not debug else error, debug)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort) as error:
        _echo(
            "; ".join(["interrupted", *getattr(error.__cause__ or error, "__notes__", ["nothing was left behind"])]),
            err=True,
        )
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - Python's own exit code for an exception is 1, which here means findings
        said = f"{type(error).__name__}: {error}"
        _fail(
            error
            if debug
            else CkptkitError(
                f"an error inside ckptkit: {said}", "please report it, with the output of `ckptkit --debug ...`"
            ),
            debug,
        )
        sys.exit(2)
    finally:
        # As the interpreter ends it would look through everything once more, for a second where model classes were imported.
        gc.freeze()


def _fail(error: Exception, debug: bool) -> None:
    if debug:
        _echo(*"".join(traceback.format_exception(error)).split("\n"), err=True)
        return
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    _echo(*str(error).split("\n"), *getattr(error, "__notes__", []), err=True)
