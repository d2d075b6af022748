"""Loads every clean test model in every format into real SGLang, an hour: `make sglang-matrix` prints what came out.

The exit code is 1 where SGLang or the witness failed a sound checkpoint. With CUDA the same cells also pass through
SGLang's repacking.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from support.sglang_cells import (
    BF16,
    BY_CKPTKIT,
    BY_SGLANG,
    CLEAN,
    FALSE,
    FP8,
    INT4,
    LIMIT,
    Cell,
    Outcome,
    checkpoint,
    every_cell,
    judged,
    values,
)
from support.sglang_runs import Case, run_cases

from ckptkit.core.errors import CkptkitError

AT_ONCE = 80  # checkpoints in a process: starting it takes ten seconds, and they stay on disk until it ends
_NUMBERS = re.compile(r"\d+(, \d+)*")


def outcomes(cells: Iterable[Cell], work: Path) -> Iterator[tuple[Cell, Outcome]]:
    """Makes the checkpoints and loads them, some models at a time, and tells each on stderr."""
    cases: dict[Cell, Case] = {}
    number = 0
    for _, group in groupby(cells, lambda cell: (cell.model, cell.sizes)):
        for cell in group:
            try:
                cases[cell] = checkpoint(cell, work)
            except CkptkitError as error:
                yield cell, Outcome(BY_CKPTKIT, f"{error.message} ({error.hint})")
        if len(cases) >= AT_ONCE:
            yield from loaded(cases, work / f"runs {(number := number + 1)}")
            cases = {}
            for path in work.iterdir():
                shutil.rmtree(path)
    if cases:
        yield from loaded(cases, work / "runs")


def loaded(cases: Mapping[Cell, Case], root: Path) -> Iterator[tuple[Cell, Outcome]]:
    """Loads checkpoints into SGLang in one process."""
    root.mkdir()
    runs = run_cases({str(cell): case for cell, case in cases.items()}, root, gpu=torch.cuda.is_available())
    for cell, case in cases.items():
        yield cell, judged(cell, runs[str(cell)], values(case))


def table(found: Mapping[Cell, Outcome]) -> Iterator[str]:
    """Counts by format and way in Markdown, then every reason with the cells that it is about."""
    yield "| format | from HF | from Megatron |"
    yield "| --- | --- | --- |"
    for form in (BF16, FP8, *INT4):
        counts = [
            Counter(outcome.word for cell, outcome in found.items() if (cell.format, cell.way) == (form, way))
            for way in ("HF", "Megatron")
        ]
        yield f"| {form} | " + " | ".join(map(in_words, counts)) + " |"
    reasons: dict[tuple[str, str], list[tuple[Cell, Outcome]]] = {}
    for cell, outcome in found.items():
        if outcome.word != CLEAN:
            reasons.setdefault((outcome.word, _NUMBERS.sub("#", outcome.why)[:60]), []).append((cell, outcome))
    for (word, _), several in reasons.items():
        names = dict.fromkeys(f"{cell.sizes} {cell.model}" for cell, _ in several)
        forms = dict.fromkeys(f"{cell.format} from {cell.way}" for cell, _ in several)
        yield f"\n- {word}, {len(several)}: {several[0][1].why}"
        yield f"  Models: {', '.join(names)}. Formats: {', '.join(forms)}."


def in_words(counts: Mapping[str, int]) -> str:
    """How many cells came to what, clean ones first."""
    words = (CLEAN, BY_CKPTKIT, BY_SGLANG, LIMIT, FALSE)
    return ", ".join(f"{counts[word]} {word}" for word in words if counts.get(word))


def spread(cells: Sequence[Cell], limit: int | None) -> list[Cell]:
    """At most so many of them, evenly from first to last."""
    wanted = min(limit or len(cells), len(cells))
    return [cells[number * len(cells) // wanted] for number in range(wanted)]


def main() -> int:
    """Prints the table; returns 1 where SGLang or the witness failed a sound checkpoint."""
    parser = argparse.ArgumentParser(prog="lab/sglang_matrix.py", description=__doc__)
    parser.add_argument("--only", default="", help="a regex for cells, as in 'wide (qwen3_moe|llama), INT4 128'")
    parser.add_argument("--limit", type=int, help="at most so many cells, evenly from the first to the last")
    options = parser.parse_args()
    chosen = spread([cell for cell in every_cell() if re.search(options.only, str(cell))], options.limit)
    found: dict[Cell, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="sglang-matrix-") as work:
        for cell, outcome in outcomes(chosen, Path(work)):
            found[cell] = outcome
            print(f"{len(found)} of {len(chosen)}: {cell}: {outcome.word} {outcome.why}", file=sys.stderr, flush=True)
    print("\n".join(table(found)))
    counts = Counter(outcome.word for outcome in found.values())
    print(f"\n{len(found)} cells: {in_words(counts)}.")
    return int(FALSE in counts)


if __name__ == "__main__":
    sys.exit(main())
