"""The verbs that write no checkpoint: `inspect`, `diff`, `lint`, `manifest`, `triage`, `explain`, `doctor`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ckptkit.app.cli import options as common
from ckptkit.app.cli.output import echo, echo_json, echo_result, end
from ckptkit.app.cli.verb import Verb
from ckptkit.app.option import option
from ckptkit.app.run_options import PATH, PATH_OR_URL
from ckptkit.core.progress import closing, size
from ckptkit.quant.ignore.readers import ALL_READERS, LIST_READERS

_LISTED = 8  # files that inspect lists by name


@click.command(cls=Verb, short_help="Describe a checkpoint from its headers.")
@click.argument("path", type=PATH_OR_URL)
@common.hf
@option(
    "--megatron-args",
    "as_args",
    is_flag=True,
    help="Print only the Megatron arguments of the model, as a launch script has them.",
)
@common.as_json
def inspect(path: str | Path, hf: str | Path | None, as_args: bool, as_json: bool) -> None:
    """Describe PATH: format, sizes, dtypes, configuration, and every tensor with layers and experts folded."""
    from ckptkit.app import inspection

    facts = inspection.model_arguments(path, hf=hf) if as_args else inspection.inspect(path, hf=hf)
    if as_json:
        echo_json(facts)
    elif as_args:
        from ckptkit.converters.megatron.arguments import launch_flags

        echo("MODEL_ARGS=(", *(f"    {line}" for line in launch_flags(facts)), ")")
    else:
        _print_facts(facts)
    end(f"{len(facts)} arguments" if as_args else f"{facts['tensors']} tensors", as_json)


def _print_facts(facts: Mapping[str, Any]) -> None:
    """Prints the model on one line, then all facts."""
    dtypes = facts.get("dtypes") or {}
    quantized = str(facts.get("quantization") or "").partition(" (")[0].partition(":")[0]
    stored = quantized or " and ".join(sorted(dtypes, key=dtypes.__getitem__, reverse=True)[:2])
    model = facts.get("architecture", facts["format"])
    echo(", ".join(filter(None, (model, stored, _scaled(facts["bytes"], "B")))))
    counts = [f"{len(facts['files'])} file{'s' * (len(facts['files']) != 1)}"] if "files" in facts else []
    counts += [f"{facts['tensors']} tensors"]
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
            texts = {name: str(one) for name, one in value.items()}
            short = {name: one if len(one) <= 60 else f"{one[:57]}..." for name, one in texts.items()}
            echo(f"{key}: " + ", ".join(f"{name}={one}" for name, one in short.items()))
        else:
            echo(f"{key}: {value}")


def _scaled(count: int, unit: str) -> str:
    """`24.6 MB`, or without a unit `11.2 M ` and `11.2 B ` like in names of models."""
    for letter, scale in (("T", 10**12), ("G" if unit else "B", 10**9), ("M", 10**6), ("k", 1000)):
        if count >= scale:
            return f"{count / scale:.1f} {letter}{unit or ' '}"
    return f"{count} {unit}"


@click.command(cls=Verb, short_help="Compare how every reader interprets an ignore list.")
@click.argument("path", type=PATH)
@option(
    "--reader",
    "readers",
    multiple=True,
    type=click.Choice(list(LIST_READERS)),
    help="A reader that must agree on the packed weights. Repeatable. [default: all]",
)
@option(
    "--fix",
    is_flag=True,
    help="Write a list that all readers interpret alike into config.json; keep the original as config.json.orig.",
)
@common.strict
@common.as_json
def lint(path: Path, readers: tuple[str, ...], fix: bool, strict: bool, as_json: bool) -> None:
    """Compare how every reader interprets the list of unquantized modules at PATH. Reads no weights.

    INT4, FP8, MXFP8, MXFP4 or NVFP4. Only config.json is required.
    """
    from ckptkit.quant.ignore.lint import lint as run

    report = run(path, readers=readers or None, fix=fix)
    echo_result(report, as_json)
    if strict and report.warnings:
        echo(f"--strict: warnings: {report.warnings}", err=True)
    after: list[str] = []
    if report.fixed:
        known = common.reader_words([reader for reader in readers if reader in ALL_READERS])
        after = ["verify", report.path, *known] if any(Path(report.path).glob("*.safetensors")) else []
    elif report.findings and report.portable not in (None, tuple(report.patterns)):
        after = ["lint", report.path, *common.reader_words(readers), "--fix"]
    end(f"{report.packed} of {report.tensors} matrices are INT4", as_json, after)
    if (report.failed or (strict and report.warnings)) and not report.fixed:
        raise SystemExit(1)


@click.command(cls=Verb, short_help="Write a digest of every tensor and side file.")
@click.argument("path", type=PATH)
@option("--output", type=PATH, help="Where to write it. [default: ckptkit.json at the root of PATH]")
@common.local_hf
@common.workers
def manifest(path: Path, output: Path | None, hf: Path | None, workers: int | None) -> None:
    """Write a digest of every tensor and side file of PATH, HF or Megatron.

    `verify --manifest` proves a copy with it, without the source.
    """
    from ckptkit.app.api import make_manifest
    from ckptkit.core.specs import TensorSpec
    from ckptkit.transfer.manifest import read_manifest

    written = make_manifest(path, output, hf=hf, workers=workers)
    echo(str(written))
    tensors = read_manifest(written).tensors
    nbytes = sum(TensorSpec(name, one.shape, one.dtype).nbytes for name, one in tensors.items())
    after = ["ckptkit", "verify", "COPY", "--manifest", str(written)]
    closing(f"digested {len(tensors)} tensors, {size(nbytes)}", shlex.join(after))


@click.command(cls=Verb, short_help="Explain a check or a symptom, and how to fix it.")
@click.argument("words", nargs=-1, metavar="[CODE | WORD...]")
def explain(words: tuple[str, ...]) -> None:
    """Explain the check CODE, its reason, and how to fix a finding.

    With words, like `explain garbled`, list the checks and the symptoms of a job with all of these words in their text,
    and for each symptom the command that finds the cause. Without arguments, list every check.
    """
    from ckptkit.verify.explain import explain as run

    echo(*run(" ".join(words)).split("\n"))


@click.command(cls=Verb, short_help="List installed parts, and the engines and trainers that can run.")
@click.argument("parts", nargs=-1, metavar="[PART...]")
@common.pythons
@common.as_json
def doctor(parts: tuple[str, ...], as_json: bool, **options: str | None) -> None:
    """List the installed packages, the engines and trainers that can run, their devices, and missing packages.

    PART is one of convert, megatron, sglang, vllm, engine, ray and remote. Exit code 2 if ckptkit's own installation or
    a named part is not usable, else 0.
    """
    from ckptkit.app.doctor import PARTS, examine, lines

    if unknown := [part for part in parts if part not in PARTS]:
        raise click.UsageError(f"there is no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    found = examine(common.pythons_of(options))
    if as_json:
        echo_json(found.to_json())
    else:
        echo(*lines(found, parts))
    if found.broken(parts):
        raise SystemExit(2)


@click.command(cls=Verb, short_help="Compare two checkpoints of any formats.")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@common.local_hf
@option("--exact", is_flag=True, help="Count a tensor in another dtype as different, even if a cast is equal.")
@common.as_json
def diff(a: Path, b: Path, hf: Path | None, exact: bool, as_json: bool) -> None:
    """Compare the checkpoints A and B, of any formats, tensor by tensor under HF names.

    Lists tensors that are equal, equal after a cast, moved (an expert, a layer, gate and up), differing and by how
    much, or only on one side. Quantized HF weights are dequantized. Without torch it compares only names and shapes.
    Exit code 0: equal; 1: different; 2: unreadable, or inconclusive because values were not compared.
    """
    from ckptkit.verify.diff.diff import diff as run

    found = run(a, b, hf=hf, exact=exact)
    echo_result(found, as_json)
    end(f"{sum(found.counts.values())} tensors, {size(found.nbytes)} read", as_json)
    if found.status != "equal":
        raise SystemExit(1 if found.status == "different" else 2)


@click.command(cls=Verb, short_help="Name the known symptoms in a job's logs.")
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=click.Path(allow_dash=True))
@common.as_json
def triage(logs: tuple[str, ...], as_json: bool) -> None:
    """Name the known symptoms in the logs of a trainer or an engine, and the command that proves or rules out each.

    `-` reads standard input. Exit code 0: no known symptom; 1: symptoms; 2: a log is empty or cannot be read.
    """
    from ckptkit.verify.triage.triage import triage as run

    found = run(logs)
    echo_result(found, as_json)
    end(f"{found.lines} lines", as_json)
    if found.found:
        raise SystemExit(1)
