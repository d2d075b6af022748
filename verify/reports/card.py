"""An audit card as Markdown: what was compared with what, by which versions, how to repeat it, and the report."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.core.progress import size
from ckptkit.core.specs import TensorSpec
from verify.check import NOT_APPLICABLE
from verify.report import Report
from verify.reports.headline import headline
from verify.reports.markdown import body, code, plain
from verify.reports.text import totals

_IN_HEAD = ("download", "megatron", "SGLang", "vLLM", "SGLang engine")  # facts with what was asked, and its release


@dataclass(frozen=True)
class Card:
    """What a card says besides its report.

    command: that repeats it.
    specs: the tensors as they are stored; empty where not all of them could be read.
    weights: a digest that stands for all of them.
    digests: the file with the digest of each, which is the JSON of the card; and whether it is signed.
    versions: of the programs that took part, by name.
    memory: the largest number of bytes in memory, of ckptkit and of any process that it started.
    """

    report: Report
    command: Sequence[str]
    specs: Sequence[TensorSpec]
    weights: str | None
    digests: Path
    signed: bool
    versions: Mapping[str, str]
    machine: str
    seconds: float
    memory: Sequence[int]


def dtype_counts(dtypes: Iterable[str]) -> str:
    """`34 bfloat16, 2 float32`."""
    return ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(Counter(dtypes).items()))


def page(card: Card) -> str:
    """The page."""
    report = card.report
    lines = [f"# {plain(Path(report.checkpoint).absolute().name)}: {report.status.upper()}", ""]
    lines += [f"{plain(headline(report))} Audited with ckptkit; its JSON is {code(card.digests.name)}.", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in _rows(card)), ""]
    lines += ["## Repeat it", "", *(f"- {what}: {code(command)}" for what, command in _commands(card)), ""]
    # What does not apply is in the JSON.
    lines += body(replace(report, facts={name: text for name, text in report.facts.items() if name != NOT_APPLICABLE}))
    return "\n".join(lines).rstrip() + "\n"


def _rows(card: Card) -> Iterator[tuple[str, str]]:
    report = card.report
    yield "checkpoint", code(report.checkpoint)
    yield "compared with", code(report.source) if report.source else "no source"
    if report.model:
        yield "model", plain(report.model)
    if card.specs:
        yield "tensors", f"{len(card.specs):,} ({dtype_counts(spec.dtype for spec in card.specs)})"
        yield "size", f"{sum(spec.nbytes for spec in card.specs):,} bytes"
    yield "verdict", plain(report.verdict)
    if report.status != "passed":  # of one that passed the verdict says so
        yield "looked at", plain(report.scope)
    yield from ((plain(name), plain(report.facts[name][0])) for name in _IN_HEAD if report.facts.get(name))
    yield "compared", plain(totals(report))
    yield "digest of all tensors", f"BLAKE3 {code(card.weights)}" if card.weights else "none: not all could be read"
    yield "signature", code(f"{card.digests.name}.sig") if card.signed else "none"
    yield "versions", plain(", ".join(f"{name} {version}" for name, version in card.versions.items()))
    yield "machine", plain(card.machine)
    yield "time", f"{card.seconds:.1f} s" + (f" ({plain(report.date)})" if report.date else "")
    own, started = card.memory
    yield "most memory", f"{size(own)}" + (f"; {size(started)} in a process that it started" if started else "")


def _commands(card: Card) -> Iterator[tuple[str, str]]:
    yield "all of it", shlex.join(card.command)
    if card.weights:
        words = ["ckptkit", "verify", "COPY", "--manifest", card.digests.name]
        yield "are these the weights", shlex.join([*words, *["--manifest-key", "PUBLIC.pem"] * card.signed])
