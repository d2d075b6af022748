"""Kills conversions and quantizations at random moments (kill -9) and resumes each: the result must be as undisturbed.

`PYTHONPATH=.:tests python -m support.kills --runs 100` prints where the kills fell, as JSON. Exit code 1 when a result
differs, when something is left beside it, and when fewer than a third of the kills fell among the files.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptkit.app.api import convert, quantize
from ckptkit.transfer.journal import JOURNAL
from quant.schemes.w4a16 import int4_scheme
from support import models  # it brings transformers with it, so that no run has to import them

FILE_BYTES = 300_000
PATIENCE_S = 300
BEFORE, AMONG, AFTER = "before the first file", "among the files", "after the last file"
Write = Callable[..., object]


@dataclass(frozen=True)
class Way:
    """A job, its undisturbed result and number of weight files, and the seconds until the first and for each."""

    name: str
    write: Write
    expected: dict[str, bytes]
    files: int
    until_first: float
    each: float


def main(runs: int, seed: int) -> None:
    """Does so many runs, of each way in turn. Raises SystemExit as the module says."""
    fell: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="ckptkit-kills-") as folder:
        root = Path(folder)
        ways = _ways(root)
        for run in range(runs):
            fell.update(_survived(ways[run % len(ways)], root / "work", random.Random(f"{seed} {run}")))
    print(json.dumps({"runs": runs, "kills": fell.total(), **{place: fell[place] for place in (BEFORE, AMONG, AFTER)}}))
    if 3 * fell[AMONG] < fell.total():
        raise SystemExit("fewer than a third of the kills fell among the files")


def _ways(root: Path) -> list[Way]:
    hf, megatron = root / "hf", root / "megatron"
    _wait(_started(lambda: models.save("qwen3_moe", hf)))
    _wait(_started(lambda: convert(hf, megatron)))
    return [
        _measured("to Megatron", lambda out, **how: convert(hf, out, max_shard_size=FILE_BYTES, **how), root / "whole"),
        _measured("to HF", lambda out, **how: convert(megatron, out, **how), root / "whole"),
        _measured("to INT4", lambda out, **how: quantize(hf, out, int4_scheme(group_size=32), **how), root / "whole"),
    ]


def _measured(name: str, write: Write, out: Path) -> Way:
    """A way, by an undisturbed run."""
    began, first = time.monotonic(), 0.0
    process = _started(lambda: write(out))
    while not _over(process):
        first = first or (time.monotonic() if _finished(out) else 0.0)
        time.sleep(0.0002)
    files = sum(1 for pattern in ("*.distcp", "*.safetensors") for _ in out.rglob(pattern))
    way = Way(name, write, models.content(out), files, first - began, (time.monotonic() - first) / files)
    shutil.rmtree(out)
    return way


def _survived(way: Way, work: Path, chance: random.Random) -> list[str]:
    """A run that is killed, resumed, now and then killed again, and compared. Returns where the kills fell."""
    work.mkdir()
    out = work / "out"
    fell = [_killed(way, out, chance)]
    while not out.exists() and chance.random() < 1 / 3:
        fell.append(_killed(way, out, chance, resume=True))
    if not out.exists():
        _wait(_started(lambda: way.write(out, resume=True)))
    if (left := os.listdir(work)) != ["out"]:
        raise SystemExit(f"{way.name}, killed {fell}: {left} instead of out alone")
    if differ := {file for file, _ in way.expected.items() ^ models.content(out).items()}:
        raise SystemExit(f"{way.name}, killed {fell}: {sorted(differ)} are not as in an undisturbed run")
    shutil.rmtree(work)
    return fell


def _killed(way: Way, out: Path, chance: random.Random, **how: object) -> str:
    """Kills a run after a random number of files and a random part of the time for one more. Returns where that was.

    Counting files, not seconds, spreads the kills evenly however busy the machine is.
    """
    found = _finished(out)
    wanted = max(found, chance.randint(-way.files // 8, way.files))
    later = chance.uniform(0, way.each if wanted > found else way.until_first)
    workers = chance.choice([1, 2, 4])
    process = _started(lambda: way.write(out, workers=workers, **how))
    end = time.monotonic() + PATIENCE_S
    while not (over := _over(process)) and _finished(out) < wanted and time.monotonic() < end:
        time.sleep(0.0002)
    if not over:
        time.sleep(later)
        os.kill(process, signal.SIGKILL)
        _wait(process)
    found = _finished(out)
    return AFTER if out.exists() or found == way.files else AMONG if found else BEFORE


def _finished(out: Path) -> int:
    """How many files of weights have a record in the journal of a run."""
    try:
        names = os.listdir(out.with_name(f"{out.name}.partial") / JOURNAL)
    except FileNotFoundError:
        return 0
    return sum(name.endswith(".json") and name != "asked.json" for name in names)


def _started(work: Callable[[], object]) -> int:
    """A forked process that does this. It imports nothing, so this process may neither compute nor start a thread."""
    if process := os.fork():
        return process
    code = 1
    try:
        work()
        code = 0
    finally:
        if error := sys.exception():
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        os._exit(code)


def _over(process: int) -> bool:
    """Whether it has ended. Raises SystemExit when it failed."""
    found, status = os.waitpid(process, os.WNOHANG)
    return _ended_well(status) if found else False


def _wait(process: int) -> None:
    """Waits until it has ended. Raises SystemExit when it failed."""
    _ended_well(os.waitpid(process, 0)[1])


def _ended_well(status: int) -> bool:
    if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
        raise SystemExit("a run failed")
    return True


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
