"""The verbs that look at no checkpoint: `explain` and `doctor`."""

from __future__ import annotations

import click

from ckptkit.app.cli import options as common
from ckptkit.app.cli.output import echo, echo_json
from ckptkit.app.cli.verb import Verb


@click.command(cls=Verb, short_help="Say what a check or a symptom means, and what to do.")
@click.argument("words", nargs=-1, metavar="[CODE | WORD...]")
def explain(words: tuple[str, ...]) -> None:
    """Say what the check CODE looks at, why it matters and what to do about a finding.

    With words, as `explain garbled`, it lists symptoms of a job with the command that tells their cause, and checks,
    whose text has all of them; without arguments every check.
    """
    from verify.explain import explain as run

    echo(*run(" ".join(words)).split("\n"))


@click.command(cls=Verb, short_help="Say what is installed, and which witnesses can run.")
@click.argument("parts", nargs=-1, metavar="[PART...]")
@common.pythons
@common.as_json
def doctor(parts: tuple[str, ...], as_json: bool, **options: str | None) -> None:
    """Say what is installed, which witnesses can run here, on which devices, and what to install for the others.

    PART is one of convert, megatron, sglang, vllm, engine, ray, remote and sign: what you want to use. Exit code 0
    unless one that is named, or ckptkit's own installation, is not usable; then 2.
    """
    from ckptkit.app.doctor import PARTS, examine, lines

    if unknown := [part for part in parts if part not in PARTS]:
        raise click.UsageError(f"there is no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    found = examine(common.pythons_of(options))
    if as_json:
        echo_json(found.to_json())
    else:
        echo(*lines(found))
    if found.broken(parts):
        raise SystemExit(2)
