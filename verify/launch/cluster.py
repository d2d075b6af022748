"""The GPUs that a launch script asks Slurm and Ray for, as far as its text says them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.regular import read_regular
from verify.issue import Issue
from verify.launch.words import Word

_MAX_BYTES = 1_000_000
_SBATCH = re.compile(r"^#SBATCH[ \t]+(.*?)[ \t]*(?:#.*)?$", re.MULTILINE)
_NODES = re.compile(r"(?:--nodes[= ]|-N[= ]?)(\d{1,6})(?!\S)")
_EACH = re.compile(r"(?:--gpus-per-node[= ]|--gres[= ]gpu:)(?:[A-Za-z][\w-]*:)?(\d{1,4})(?!\S)")
_ALL = re.compile(r"(?:--gpus[= ]|-G[= ]?)(?:[A-Za-z][\w-]*:)?(\d{1,6})(?!\S)")
_RAY = re.compile(r"^\s*ray\s+start\s([^#\n]*(?:\\\n[^#\n]*)*)", re.MULTILINE)
_JOINS = re.compile(r"ray\s+start\s[^\n]*--address")
_GPUS = re.compile(r"--num-gpus[= ][\"']?(\d{1,4})(?!\w)")
_LOOPBACK = re.compile(r"--node-ip-address[= ][\"']?(?:127\.0\.0\.1|localhost)(?![\w.])")


@dataclass(frozen=True)
class Lent:
    """GPUs that a script has for its job, and the words that say so. `alone`: no other machine can add any."""

    gpus: int
    source: str
    file: Path
    alone: bool = True


def lent(words: Iterable[Word]) -> Iterator[Lent]:
    """What the files that these words stand in ask Slurm and Ray for."""
    for file in dict.fromkeys(word.file for word in words if word.file):
        text = _text(file)
        yield from _slurm(text, file)
        yield from _ray(text, file)


def short(found: Iterable[Lent], needed: int, nodes: int, what: str) -> Iterator[Issue]:
    """GPUs that are too few for a job that needs so many, on so many nodes.

    Of a head of Ray that others may join, only where the job is on one node; nobody can know, so it is a warning.
    """
    for one in found:
        if one.gpus < needed and (one.alone or nodes == 1):
            hint = "the job waits for GPUs that never come: ask for as many as it places, or place fewer"
            expected = f"at least {needed} GPUs, {what}"
            yield Issue(expected, one.source, hint, file=one.file, severity="error" if one.alone else "warning")


def _text(file: Path) -> str:
    try:
        return read_regular(file, _MAX_BYTES).decode(errors="replace")
    except (OSError, CkptkitError):
        return ""


def _slurm(text: str, file: Path) -> Iterator[Lent]:
    lines = [match[1] for match in _SBATCH.finditer(text)]
    if any("hetjob" in line for line in lines):
        return
    nodes, each, all_of_them = (_last(pattern, lines) for pattern in (_NODES, _EACH, _ALL))
    if all_of_them is not None:
        yield Lent(all_of_them, f"{all_of_them} GPUs (#SBATCH)", file)
    elif each is not None and nodes is not None:
        yield Lent(nodes * each, f"{nodes} nodes x {each} = {nodes * each} GPUs (#SBATCH)", file)


def _last(pattern: re.Pattern[str], lines: Iterable[str]) -> int | None:
    found = [match[1] for line in lines for match in pattern.finditer(line)]
    return int(found[-1]) if found else None


def _ray(text: str, file: Path) -> Iterator[Lent]:
    heads = [match[1] for match in _RAY.finditer(text) if "--head" in match[1]]
    if len(heads) != 1 or _JOINS.search(text) or (number := _GPUS.search(heads[0])) is None:
        return
    message = f"{number[1]} GPUs (ray start --head --num-gpus {number[1]})"
    yield Lent(int(number[1]), message, file, alone=_LOOPBACK.search(heads[0]) is not None)
