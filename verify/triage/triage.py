"""Finds known symptoms in the logs of a job, with the command that proves or rules out each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ckptkit.core.errors import CkptkitError
from ckptkit.core.findings_text import Entry, TextReport, columns, lay_out, plain
from ckptkit.core.installation import program_version
from ckptkit.core.signature import public
from ckptkit.storage.regular import open_regular
from ckptkit.verify.triage.scan import Found, Place
from ckptkit.verify.triage.symptom import Symptom

SCHEMA = "ckptkit-triage/1"
STDIN = "-"
_OPENED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_COMPRESSED = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"\xfd7zXZ": "xzcat"}


@dataclass(frozen=True)
class SymptomMatch:
    """A symptom in the logs."""

    symptom: Symptom
    count: int  # lines
    places: Sequence[Place]  # the first lines


@dataclass(frozen=True)
class Triage:
    """The symptoms of logs: causes and effects in the order of the logs."""

    version: str
    logs: Sequence[str]
    lines: int
    causes: Sequence[SymptomMatch]
    effects: Sequence[SymptomMatch]
    loaded: Sequence[Place]  # lines that name a loaded checkpoint

    @property
    def found(self) -> bool:
        """Whether there is a known symptom."""
        return bool(self.causes or self.effects)

    def __str__(self) -> str:
        return "\n".join(triage_lines(self))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON: `ckptkit-triage/1`, which only ever gains keys."""
        return {
            "schema": SCHEMA,
            "version": self.version,
            "logs": list(self.logs),
            "lines": self.lines,
            "symptoms": [
                {
                    "key": sign.symptom.key,
                    "title": sign.symptom.title,
                    "effect": sign.symptom.effect,
                    "count": sign.count,
                    "places": [vars(place) for place in sign.places],
                    "meaning": sign.symptom.meaning,
                    "command": sign.symptom.command,
                    "codes": list(sign.symptom.codes),
                }
                for sign in (*self.causes, *self.effects)
            ],
            "loaded": [vars(place) for place in self.loaded],
        }


@public()
def triage(logs: Sequence[str | Path]) -> Triage:
    """Finds known symptoms in a log or several; `-` is standard input. Raises CkptkitError for an unreadable one."""
    if not logs:
        raise CkptkitError("no log was given", "pass the log of the trainer, or `-` for standard input")
    found = Found()
    for log in logs:
        before = found.lines
        with _opened(log) as stream:
            found.scan(stream, _name(log))
        if found.lines == before:
            raise CkptkitError(f"{_name(log)} is empty", "pass the log of the job, or of its driver if it is a Ray job")
    # With several models it is unknown which one a line is about.
    served = next(iter(found.served)) if len(found.served) == 1 else None
    shown = {symptom: symptom.for_vllm() if found.engines == {"vLLM"} else symptom for symptom in found.counts}
    shown = {symptom: served.of(one) if served else one for symptom, one in shown.items()}
    signs = [SymptomMatch(shown[symptom], count, found.places[symptom]) for symptom, count in found.counts.items()]
    return Triage(
        version=program_version(),
        logs=[_name(log) for log in logs],
        lines=found.lines,
        causes=[sign for sign in signs if not sign.symptom.effect],
        effects=[sign for sign in signs if sign.symptom.effect],
        loaded=found.loaded,
    )


def _name(log: str | Path) -> str:
    return "standard input" if str(log) == STDIN else str(log)


@contextmanager
def _opened(log: str | Path) -> Iterator[BinaryIO]:
    if str(log) == STDIN:
        yield sys.stdin.buffer
        return
    try:
        # A file that the shell has opened, as `<(...)` does, may be a pipe.
        with Path(log).open("rb") if str(log).startswith(_OPENED) else open_regular(Path(log)) as stream:
            head = stream.peek()  # a pipe cannot be read twice
            for magic, program in _COMPRESSED.items():
                if head.startswith(magic):
                    raise CkptkitError(f"{log} is compressed", f"{program} {log} | ckptkit triage -")
            if b"\0" in head:
                raise CkptkitError(f"{log} is not text", "pass the log of the job")
            yield stream
    except OSError as error:
        raise CkptkitError(f"{log}: {error.strerror or error}", "pass a log file, or `-` for standard input") from error


def triage_lines(found: Triage) -> Iterator[str]:
    """Yields the report for people."""
    where = f"{', '.join(found.logs)} ({found.lines} line{'s' * (found.lines > 1)})"
    count, more = (
        len(found.causes) + len(found.effects),
        "; check the files with `ckptkit preflight` and `ckptkit verify`",
    )
    text = TextReport(
        [_entry(sign) for sign in (*found.causes, *found.effects)],
        ("", f"{count} known symptom{'s' * (count > 1)} in {where}" if count else f"no known symptom in {where}{more}"),
        {"loaded, according to the logs": [str(place) for place in found.loaded]} if found.loaded else {},
    )
    yield from plain(lay_out(text, columns(), every=True))


def _entry(sign: SymptomMatch) -> Entry:
    symptom, rest = sign.symptom, sign.count - len(sign.places)
    codes = f"  ({', '.join(symptom.codes)})" if symptom.codes else ""
    fields = [("line", str(place)) for place in sign.places]
    fields += [("", f"and {rest} more line{'s' * (rest > 1)}")] if rest else []
    fields += [("meaning", symptom.meaning), ("next", f"{symptom.command}{codes}")]
    return Entry(symptom.key, "effect" if symptom.effect else "cause", "", symptom.title, fields, "", symptom.title)
