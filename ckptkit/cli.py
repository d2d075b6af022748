"""The command line. Exit codes: 0 nothing wrong, 1 findings, 2 bad usage or input, 130 interrupted."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptkit.errors import CkptkitError

if TYPE_CHECKING:
    from ckptkit.api import Written
    from verify.report import Report

_overwrite = click.option("--overwrite", is_flag=True, help="Replace what is at DST, once the new one is whole.")
_dry_run = click.option("--dry-run", is_flag=True, help="Check everything and print the plan; write nothing.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else there.")
_sizes = [
    click.option(f"--{name}", default=1, show_default=True, type=click.IntRange(1), help=f"{what} parallel size to verify with.")
    for name, what in (("tp", "Tensor"), ("pp", "Pipeline"), ("ep", "Expert"))
]


def _parallel(command: Any) -> Any:
    for option in reversed(_sizes):
        command = option(command)
    return command


def _int4(command: Any) -> Any:
    options = [
        click.option("--group-size", default="128", show_default=True, type=click.Choice(["32", "64", "128"]), help="Weights that share a scale."),
        click.option(
            "--grid",
            default="qmax7",
            show_default=True,
            type=click.Choice(["qmax7", "minmax"]),
            help="Scale: absmax/7 (slime's QAT, Kimi) or absmax/7.5 (compressed-tensors).",
        ),
        click.option("--ignore", multiple=True, help="More modules to leave as they are: a module name, or `re:` and a regex. Repeatable."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckptkit")
@click.option("--debug", is_flag=True, help="Show a traceback when something goes wrong.")
def cli(debug: bool) -> None:
    """Converts HF <-> Megatron checkpoints, quantizes them to INT4, and proves what Megatron and SGLang loaded."""


@cli.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--hf", type=click.Path(path_type=Path), help="HF directory that gives config, tokenizer and shard layout on the way back.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", "bfloat16", "float16", "float32"]))
@click.option("--dialect", type=click.Choice(["mcore", "slime"]), help="Names of Megatron's tensors: megatron-core's own (the default) or slime's modules.")
@click.option("--quantize", "quantization", type=click.Choice(["w4a16"]), help="Megatron -> INT4 HF in one pass.")
@_int4
@_overwrite
@_dry_run
@_json
def convert(
    src: Path,
    dst: Path,
    hf: Path | None,
    dtype: str,
    dialect: str | None,
    quantization: str | None,
    group_size: str,
    grid: str,
    ignore: tuple[str, ...],
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert SRC to DST. An HF directory becomes Megatron torch_dist; a Megatron root, release/ or iter_*/ becomes HF.

    A quantized release (FP8, MXFP4, INT4) is dequantized on the way to Megatron.
    """
    from ckptkit.api import convert as run

    scheme = _scheme(group_size, grid, ignore) if quantization else None
    _print_written(run(src, dst, hf=hf, dtype=dtype, dialect=dialect, quantize=scheme, overwrite=overwrite, dry_run=dry_run), dry_run, as_json)


@cli.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@_int4
@_overwrite
@_dry_run
@_json
def quantize(src: Path, dst: Path, group_size: str, grid: str, ignore: tuple[str, ...], overwrite: bool, dry_run: bool, as_json: bool) -> None:
    """Quantize the HF checkpoint SRC to INT4 W4A16 (compressed-tensors pack-quantized) at DST."""
    from ckptkit.api import quantize as run

    _print_written(run(src, dst, _scheme(group_size, grid, ignore), overwrite=overwrite, dry_run=dry_run), dry_run, as_json)


def _scheme(group_size: str, grid: str, ignore: tuple[str, ...]) -> Any:
    from quant.scheme import QuantScheme

    return QuantScheme(int(group_size), "minmax" if grid == "minmax" else "qmax7", ignore)


def _print_written(written: Written, dry_run: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**vars(written), "layout": dict(written.layout)}, indent=2))
        return
    size = f"{written.tensors} tensors, {written.bytes / 1e9:.3f} GB" + (f", dequantized from {written.dequantized}" if written.dequantized else "")
    if dry_run:
        click.echo(f"would write {written.destination} ({written.format}): {size}")
        for name in written.names:
            click.echo(f"  {name}")
        for file, names in written.layout.items():
            click.echo(f"  {file}: {len(names)} tensors")
        return
    click.echo(f"{written.destination} ({written.format}): {size}")


def _print_arguments(args: Mapping[str, Any], as_json: bool) -> None:
    from converters.launch_flags import launch_flags

    if as_json:
        click.echo(json.dumps(dict(args), indent=2))
        return
    click.echo("MODEL_ARGS=(")
    for line in launch_flags(args):
        click.echo(f"    {line}")
    click.echo(")")


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--hf", type=click.Path(path_type=Path), help="HF directory with the config of a Megatron checkpoint that does not carry it.")
@click.option("--megatron-args", "as_args", is_flag=True, help="Print the Megatron arguments of the model, as a launch script wants them, and nothing else.")
@_json
def inspect(path: Path, hf: Path | None, as_args: bool, as_json: bool) -> None:
    """Say what lies at PATH: format, sizes, dtypes, configuration, and every tensor with layers and experts folded."""
    from ckptkit.api import inspect as run
    from ckptkit.api import model_arguments

    if as_args:
        _print_arguments(model_arguments(path, hf=hf), as_json)
        return
    facts = run(path, hf=hf)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        if isinstance(value, list):
            click.echo(f"{key}:")
            for line in value:
                click.echo(f"  {line}")
        elif isinstance(value, dict):
            click.echo(f"{key}: " + ", ".join(f"{name}={_short(one)}" for name, one in value.items()))
        else:
            click.echo(f"{key}: {value}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--source", type=click.Path(path_type=Path), help="What it was made from, HF or Megatron: every value is compared.")
@click.option("--hf", type=click.Path(path_type=Path), help="HF directory with the config of a Megatron checkpoint that does not carry it.")
@click.option("--against-megatron", is_flag=True, help="Load it into real Megatron, one process a rank, and compare every parameter.")
@click.option("--against-sglang", is_flag=True, help="Load it into the real SGLang model class and compare every parameter.")
@_parallel
@click.option("--etp", type=click.IntRange(1), help="Tensor parallel size inside experts. [default: tp, or 1 with --ep]")
@click.option("--vpp", default=1, show_default=True, type=click.IntRange(1), help="Virtual pipeline stages a rank.")
@click.option("--report", "reports", multiple=True, type=click.Path(path_type=Path), help="Also write the report to this .json file. Repeatable.")
@click.option("--strict", is_flag=True, help="Exit 1 when a check was skipped.")
@_json
def verify(
    checkpoint: Path,
    source: Path | None,
    hf: Path | None,
    against_megatron: bool,
    against_sglang: bool,
    tp: int,
    pp: int,
    ep: int,
    etp: int | None,
    vpp: int,
    reports: tuple[Path, ...],
    strict: bool,
    as_json: bool,
) -> None:
    """Prove CHECKPOINT: files, values, quantization, and what real Megatron and real SGLang make of it."""
    from verify.run import verify as run

    for path in reports:
        if path.suffix != ".json" or path.is_dir() or not path.absolute().parent.is_dir():
            raise click.BadParameter(f"{path}: must be a .json file in a directory that is there", param_hint="--report")
    against = frozenset(name for name, wanted in (("megatron", against_megatron), ("sglang", against_sglang)) if wanted)
    report = run(checkpoint, source=source, hf=hf, tp=tp, pp=pp, ep=ep, etp=etp, vpp=vpp, against=against, command=sys.argv)
    for path in reports:
        path.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    _print_report(report, as_json, strict)


@cli.command()
@click.option("--hf-checkpoint", type=click.Path(path_type=Path), help="What the rollout engine loads.")
@click.option("--load", type=click.Path(path_type=Path), help="What the trainer loads.")
@click.option("--ref-load", type=click.Path(path_type=Path), help="What the reference model loads.")
@click.option("--ckpt-step", type=click.IntRange(0), help="The iteration to load instead of the latest.")
@_parallel
@click.option("--strict", is_flag=True, help="Exit 1 when a check was skipped.")
@_json
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- LAUNCH ARGUMENTS]")
def preflight(
    hf_checkpoint: Path | None,
    load: Path | None,
    ref_load: Path | None,
    ckpt_step: int | None,
    tp: int,
    pp: int,
    ep: int,
    strict: bool,
    as_json: bool,
    arguments: tuple[str, ...],
) -> None:
    """Before a training job: which weights each side would really load, and whether they belong together. Reads no weights.

    Of the launch script's own arguments, given behind --, those about parallel sizes and pipeline stages are looked at.
    """
    from verify.preflight import preflight as run

    if hf_checkpoint is None and load is None and ref_load is None:
        raise click.UsageError("give at least one of --hf-checkpoint, --load and --ref-load")
    if arguments and not arguments[0].startswith("-"):
        raise click.UsageError(f"unexpected argument {arguments[0]!r}; launch arguments come behind --")
    report = run(hf_checkpoint=hf_checkpoint, load=load, ref_load=ref_load, ckpt_step=ckpt_step, tp=tp, pp=pp, ep=ep, arguments=arguments)
    _print_report(report, as_json, strict)


def _print_report(report: Report, as_json: bool, strict: bool) -> None:
    from verify.render import render

    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        render(report)
    skipped = [check.code for check in report.checks if check.status == "skipped"]
    if strict and skipped:
        click.echo(f"--strict: skipped {', '.join(skipped)}", err=True)
    if report.status == "failed" or (strict and skipped):
        raise SystemExit(1)


@cli.command()
@click.argument("code")
def explain(code: str) -> None:
    """Say what a check looks at, why it matters and what to do about a finding."""
    from verify.explain import explain as run

    click.echo(run(code))


def main() -> None:
    """Entry point of the `ckptkit` command."""
    debug = "--debug" in sys.argv
    try:
        result = cli.main(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except CkptkitError as error:
        _fail(error, debug)
        sys.exit(2)
    except OSError as error:
        _fail(CkptkitError(str(error), "check the path and its permissions") if not debug else error, debug)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; nothing was left behind", err=True)
        sys.exit(130)


def _fail(error: Exception, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
        return
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(str(error), err=True)
