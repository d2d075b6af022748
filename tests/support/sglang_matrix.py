"""Every clean test model in every format into real SGLang: `make sglang-matrix` prints what came out, about an hour.

A cell is clean where every element of every tensor stands in a parameter, bit for bit, and none was left unwritten; or
ckptkit or SGLang refuses it, and the reason is printed; or SGLang's class leaves something out that LIMITS names. All
else is a false failure, and the exit code is 1. With CUDA the same cells also pass through SGLang's repacking.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from ckptkit.core.errors import CkptkitError
from support.sglang_cells import BF16, FP8, INT4, Cell, checkpoint, every_cell, values
from support.sglang_runs import Case, run_cases
from verify.witnesses.loading.job import LoadReport
from verify.witnesses.loading.run import LoadRun

AT_ONCE = 80  # checkpoints in a process: starting it takes ten seconds, and they stay on disk until it ends
CLEAN, BY_CKPTKIT, BY_SGLANG, LIMIT, FALSE = "clean", "ckptkit refuses", "SGLang refuses", "left out", "FALSE FAILURE"
# What SGLang's classes leave out of sound checkpoints: how the names of the tensors end, by a regex for cells.
LIMITS: Mapping[str, str] = {r"(llama|mistral|gpt_oss)\S*, FP8": ".weight_scale_inv"}
# What SGLang refuses, by a regex for its words.
REFUSALS: Sequence[str] = (r"size_[nk] = \d+ is not divisible by tile_[nk]_size",)
# SGLang leaves draft layers (of 12 layers, the next) to another model, and never uses the shapes of packed weights.
NOT_LOADED = re.compile(r"(mtp|model\.layers\.12)\..*|.*(inv_freq|weight_shape)")
_NUMBERS = re.compile(r"\d+(, \d+)*")


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: one of the five words, and why."""

    word: str
    why: str = ""


def judged(cell: Cell, run: LoadRun, sizes: Mapping[str, int]) -> Outcome:
    """The outcome of a cell that was loaded; `sizes`: the bytes of its tensors."""
    if run.report is None:
        said = (run.crash or run.unable or "").partition("; ")[2]
        return Outcome(BY_SGLANG if any(re.search(words, said) for words in REFUSALS) else FALSE, said)
    wrong = list(troubles(run.report, sizes, cell.way == "Megatron"))
    if not wrong:
        return Outcome(CLEAN)
    ending = next((ending for cells, ending in LIMITS.items() if re.search(cells, str(cell))), None)
    known = ending is not None and all(name.endswith(ending) for name, _ in wrong)
    return Outcome(LIMIT if known else FALSE, f"{wrong[0][0]}: {wrong[0][1]}, and {len(wrong) - 1} more")


def troubles(report: LoadReport, sizes: Mapping[str, int], streamed: bool) -> Iterator[tuple[str, str]]:
    """Names, and what is wrong with them."""
    for seen in (*report.unwritten, *report.dropped, *report.differing, *report.routers, *(report.repacked or ())):
        yield seen.tensor, seen.what
    for name in report.computed:
        yield name, "it was computed, and not compared"
    for text in report.unchecked:
        yield text, "it was not compared after repacking"
    wanted = {name: size for name, size in sizes.items() if not NOT_LOADED.fullmatch(name)}
    if streamed and sum(wanted.values()) != report.bytes:  # experts that are fused in the release are streamed apart
        yield "all tensors", f"{report.bytes} of {sum(wanted.values())} bytes were compared"
    for name in [] if streamed else wanted.keys() - report.equal.keys():
        yield name, "it was not compared"


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
    parser = argparse.ArgumentParser(prog="python -m support.sglang_matrix", description=__doc__)
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
