"""The verbs about one checkpoint at rest: `inspect`, `lint` and `manifest`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ckptkit.app.cli import options as common
from ckptkit.app.cli.ending import end, end_lint, end_manifest
from ckptkit.app.cli.output import echo, echo_json
from ckptkit.app.cli.verb import Verb
from quant.selection.readers import LIST_READERS

_LISTED = 8  # files that inspect lists by name


@click.command(cls=Verb, short_help="Say what lies at a path.")
@click.argument("path", type=common.PATH_OR_URL)
@common.hf
@click.option(
    "--megatron-args",
    "as_args",
    is_flag=True,
    help="Print the Megatron arguments of the model, as a launch script wants them, and nothing else.",
)
@common.as_json
def inspect(path: str | Path, hf: str | Path | None, as_args: bool, as_json: bool) -> None:
    """Say what lies at PATH: format, sizes, dtypes, configuration, every tensor with layers and experts folded."""
    from ckptkit.app import inspection

    facts = inspection.model_arguments(path, hf=hf) if as_args else inspection.inspect(path, hf=hf)
    if as_json:
        echo_json(facts)
    elif as_args:
        _print_arguments(facts)
    else:
        _print_facts(facts)
    end(f"{len(facts)} arguments" if as_args else f"{facts['tensors']} tensors", as_json)


def _print_arguments(arguments: Mapping[str, Any]) -> None:
    from converters.megatron.flags import launch_flags

    echo("MODEL_ARGS=(", *(f"    {line}" for line in launch_flags(arguments)), ")")


def _print_facts(facts: Mapping[str, Any]) -> None:
    counts = [f"{len(facts['files'])} file{'s' * (len(facts['files']) != 1)}"] if "files" in facts else []
    counts += [f"{facts['tensors']} tensors", f"{_scaled(facts['bytes'], 'B')}"]
    counts += [f"{_scaled(facts['parameters'], '')}parameters"] if "parameters" in facts else []
    echo(", ".join(counts))
    for key, value in facts.items():
        if isinstance(value, list):
            echo(f"{key}:", *(f"  {line}" for line in value))
        elif isinstance(value, dict) and "summary" in value:
            echo(f"{key}: {value['summary']}")
        elif key == "files" and len(value) > _LISTED:
            first, *_, last = value
            echo(f"files: {first} to {last}, {min(value.values())} to {max(value.values())} tensors each")
        elif isinstance(value, dict):
            echo(f"{key}: " + ", ".join(f"{name}={_short(one)}" for name, one in value.items()))
        else:
            echo(f"{key}: {value}")


def _scaled(count: int, unit: str) -> str:
    """`24.6 MB`, and with no unit `11.2 M ` or `11.2 B ` as models are named."""
    for letter, size in (("T", 10**12), ("G" if unit else "B", 10**9), ("M", 10**6), ("k", 1000)):
        if count >= size:
            return f"{count / size:.1f} {letter}{unit or ' '}"
    return f"{count} {unit}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@click.command(cls=Verb, short_help="Say how every reader takes an ignore list.")
@click.argument("path", type=common.PATH)
@click.option(
    "--reader",
    "readers",
    multiple=True,
    type=click.Choice(list(LIST_READERS)),
    help="Who must agree on what is packed. Repeatable. [default: all]",
)
@click.option(
    "--fix",
    is_flag=True,
    help="Write the list that all readers take alike into config.json; the original stays as config.json.orig.",
)
@common.strict
@common.as_json
def lint(path: Path, readers: tuple[str, ...], fix: bool, strict: bool, as_json: bool) -> None:
    """Say how every reader takes the list of unquantized modules of the checkpoint at PATH. Reads no weights.

    INT4, FP8, MXFP8, MXFP4 or NVFP4. A lone config.json is enough.
    """
    from quant.lint.lint import lines
    from quant.lint.lint import lint as run

    report = run(path, readers=readers or None, fix=fix)
    if as_json:
        echo_json(report.to_json())
    else:
        echo(*lines(report))
    if strict and report.warnings:
        echo(f"--strict: warnings: {report.warnings}", err=True)
    end_lint(report, readers, as_json)
    if (report.failed or (strict and report.warnings)) and not report.fixed:
        raise SystemExit(1)


@click.command(cls=Verb, short_help="Write a digest of every tensor and side file.")
@click.argument("path", type=common.PATH)
@click.option(
    "--output",
    type=common.PATH,
    help="Where to write it. [default: ckptkit.json at the root of PATH]",
)
@common.local_hf
@common.workers
def manifest(path: Path, output: Path | None, hf: Path | None, workers: int | None) -> None:
    """Write a digest of every tensor and side file of PATH, HF or Megatron.

    `verify --manifest` proves a copy with it, with no source at hand.
    """
    from ckptkit.app.api import make_manifest

    written = make_manifest(path, output, hf=hf, workers=workers)
    echo(str(written))
    end_manifest(written)
