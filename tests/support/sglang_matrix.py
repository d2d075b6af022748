"""What became of a test model in a format that was loaded into real SGLang; `make sglang-matrix` loads all of them.

A cell is clean where every element of every tensor stands in a parameter, bit for bit, and none was left unwritten; or
ckptkit or SGLang refuses it, and the reason is printed; or SGLang's class leaves something out that LIMITS names. All
else is a false failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.verify.witnesses.loading.job import LoadReport
from ckptkit.verify.witnesses.runner import Answer
from support.sglang_cells import Cell

CLEAN, BY_CKPTKIT, BY_SGLANG, LIMIT, FALSE = "clean", "ckptkit refuses", "SGLang refuses", "left out", "FALSE FAILURE"
# What SGLang's classes leave out of sound checkpoints: how the names of the tensors end, by a regex for cells.
LIMITS: Mapping[str, str] = {r"(llama|mistral|gpt_oss)\S*, FP8": ".weight_scale_inv"}
# What SGLang refuses, by a regex for its words.
REFUSALS: Sequence[str] = (r"size_[nk] = \d+ is not divisible by tile_[nk]_size",)
# SGLang leaves draft layers (of 12 layers, the next) to another model, and never uses the shapes of packed weights.
NOT_LOADED = re.compile(r"(mtp|model\.layers\.12)\..*|.*(inv_freq|weight_shape)")


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: one of the five words, and why."""

    word: str
    why: str = ""


def judged(cell: Cell, run: Answer[LoadReport], sizes: Mapping[str, int]) -> Outcome:
    """The outcome of a cell that was loaded; `sizes`: the bytes of its tensors."""
    if run.report is None:
        said = (run.failure.message if run.failure else "").partition("; ")[2]
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
