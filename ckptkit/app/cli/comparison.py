"""The verbs for a job that went wrong: `diff` compares two checkpoints, `triage` reads logs."""

from __future__ import annotations

from pathlib import Path

import click

from ckptkit.app.cli import options as common
from ckptkit.app.cli.ending import end
from ckptkit.app.cli.output import echo, echo_json
from ckptkit.app.cli.verb import Verb
from ckptkit.core.progress import size


@click.command(cls=Verb, short_help="Compare two checkpoints of any formats.")
@click.argument("a", type=common.PATH)
@click.argument("b", type=common.PATH)
@common.local_hf
@click.option("--exact", is_flag=True, help="A tensor in another dtype is a difference, even where a cast is equal.")
@common.as_json
def diff(a: Path, b: Path, hf: Path | None, exact: bool, as_json: bool) -> None:
    """Compare the checkpoints A and B, of any formats, tensor by tensor under HF names.

    Says which tensors are equal, equal after a cast, moved (an expert, a layer, gate and up), differing and by how
    much, or only on one side. Quantized HF weights are dequantized. Without torch it compares names and shapes alone.
    Exit code 0: equal; 1: different; 2: unreadable, or inconclusive, since values were not compared.
    """
    from verify.diff.diff import diff as run
    from verify.diff.text import lines

    found = run(a, b, hf=hf, exact=exact)
    if as_json:
        echo_json(found.to_json())
    else:
        echo(*lines(found))
    end(f"{sum(found.counts.values())} tensors, {size(found.nbytes)} read", as_json)
    if found.status != "equal":
        raise SystemExit(1 if found.status == "different" else 2)


@click.command(cls=Verb, short_help="Name the known symptoms in a job's logs.")
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=click.Path(allow_dash=True))
@common.as_json
def triage(logs: tuple[str, ...], as_json: bool) -> None:
    """Name the known symptoms in the logs of a trainer or an engine, and the command that proves or rules out each.

    `-` reads standard input. Exit code 0: no known symptom; 1: symptoms; 2: a log cannot be read, or is empty.
    """
    from verify.triage.triage import lines
    from verify.triage.triage import triage as run

    found = run(logs)
    if as_json:
        echo_json(found.to_json())
    else:
        echo(*lines(found))
    end(f"{found.lines} lines", as_json)
    if found.found:
        raise SystemExit(1)
