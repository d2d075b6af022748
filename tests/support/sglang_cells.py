"""The cells of the matrix model x format x way for SGLang, which `make sglang-matrix` loads.

A cell is clean where every element of every tensor stands in a parameter, bit for bit, and none was left unwritten; or
ckptkit or SGLang refuses it; or SGLang's class leaves something out that LIMITS names. All else is a false failure.
"""

import re
from dataclasses import dataclass
from typing import Literal

import torch
from families import CASES, case

from ckptkit.app.api import convert, quantize
from ckptkit.quant.schemes.w4a16 import int4_scheme
from support import models, sglang_families
from support.quantized import one_an_expert, small_groups_allowed, with_fp8_blocks
from support.sglang_formats import EXPERTS, SHARED
from support.sglang_runs import Case
from support.sglang_sizes import widened

# Those of the other tests, whose odd sizes show every mix-up, and those that every group size divides.
Sizes = Literal["odd", "wide"]
# "HF": the release, or what `quantize` makes of it. "Megatron": that is streamed, or `convert --quantize` makes INT4.
Way = Literal["HF", "Megatron"]

GROUPS = (32, 64, 128, "channel")
GRIDS = {
    "minmax": {"grid": "minmax"},
    "qmax7": {"grid": "qmax7"},
    "zero points": {"grid": "minmax", "symmetric": False},
}
WITH_72_INPUTS = ("qwen3_next", "qwen3_5_moe")  # in the shared expert, which no group divides
BF16, FP8 = "BF16", "FP8 blocks"
INT4 = {
    f"INT4 {'rows' if size == 'channel' else size} {grid}": {"group_size": size, **how}
    for size in GROUPS
    for grid, how in GRIDS.items()
}
CLEAN, BY_CKPTKIT, BY_SGLANG, LIMIT, FALSE = "clean", "ckptkit refuses", "SGLang refuses", "left out", "FALSE FAILURE"
# What SGLang's classes leave out of sound checkpoints: how the names of the tensors end, by a regex for cells.
LIMITS = {r"(llama|mistral|gpt_oss)\S*, FP8": ".weight_scale_inv"}
# What SGLang refuses, by a regex for its words.
REFUSALS = (r"size_[nk] = \d+ is not divisible by tile_[nk]_size",)
# SGLang leaves draft layers (of 12 layers, the next) to another model, and never uses the shapes of packed weights.
NOT_LOADED = re.compile(r"(mtp|model\.layers\.12)\..*|.*(inv_freq|weight_shape)")


@dataclass(frozen=True)
class Cell:
    """A test model in one of two sizes, a format (BF16, FP8 or a key of INT4) and the way it was made."""

    model: str
    sizes: Sizes
    format: str
    way: Way

    def __str__(self):
        return f"{self.sizes} {self.model}, {self.format} from {self.way}"

    @property
    def block(self):
        """Rows and columns of an FP8 block: 128, as in the releases, where the sizes allow it."""
        return 128 if self.sizes == "wide" else 8 if self.model.startswith(WITH_72_INPUTS) else 16

    @property
    def scheme(self):
        """What `int4_scheme` is given: also what must stay unpacked, by the refusals that say so."""
        ignore = ()
        if self.sizes == "odd" and self.model.startswith(WITH_72_INPUTS):
            ignore = (EXPERTS,)
        elif self.format.endswith("zero points") and self.model.startswith("glm4_moe") and "lite" not in self.model:
            ignore = (SHARED,)
        return INT4[self.format] | {"ignore": ignore}


def every_cell():
    """Those of a model and its sizes one after the other. ckptkit writes no FP8, so it only comes from HF."""
    for model in sglang_families.CLEAN:
        for sizes in ("odd", "wide"):
            yield Cell(model, sizes, BF16, "HF")
            yield Cell(model, sizes, BF16, "Megatron")
            yield Cell(model, sizes, FP8, "HF")
            for form in INT4:
                yield Cell(model, sizes, form, "HF")
                yield Cell(model, sizes, form, "Megatron")


def checkpoint(cell, root, reader="sglang"):
    """Makes the cell's checkpoint under `root`, from a release and a Megatron one that cells share.

    `reader`: the engine whose layout zero points get. Raises CkptkitError where ckptkit refuses the format.
    """
    release = root / f"{cell.sizes} {cell.model}"
    if not release.exists():
        kind = widened(cell.model) if cell.sizes == "wide" else CASES[cell.model]
        case.save(cell.model, kind, release, torch.bfloat16)
    megatron = release.with_name(f"{release.name} megatron")
    if cell.way == "Megatron" and not megatron.exists():
        convert(release, megatron)
    if cell.format == BF16:
        return Case(release) if cell.way == "HF" else Case(megatron, release)
    target = root / str(cell)
    if cell.format == FP8:
        plain = one_an_expert(release, root / f"{release.name} experts", transposed="qwen3_vl" in cell.model)
        return Case(with_fp8_blocks(plain, target, cell.block))
    # Zero points of experts are in a layout of SGLang's own, of which its kernel does not read small groups.
    # SGLang runs Seed-OSS by transformers' class, for which `quantize` refuses INT4.
    named = cell.format.endswith("zero points") or (reader == "vllm" and cell.model.startswith("seed_oss"))
    readers = {"readers": (reader,)} if named else {}
    with small_groups_allowed():
        if cell.way == "HF":
            quantize(release, target, int4_scheme(**cell.scheme), **readers)
        else:
            convert(megatron, target, quantize=int4_scheme(**cell.scheme), **readers)
    return Case(target)


def values(case):
    return {name: tensor.nbytes for name, tensor in models.tensors(case.source or case.checkpoint).items()}


@dataclass(frozen=True)
class Outcome:
    word: str
    why: str = ""


def judged(cell, run, sizes):
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


def troubles(report, sizes, streamed):
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
