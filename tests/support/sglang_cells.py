"""The cells of the matrix model x format x way for SGLang, and how the checkpoint of each is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from families import CASES, case

from ckptkit.app.api import convert, quantize
from ckptkit.quant.schemes.w4a16 import int4_scheme
from support import models
from support.quantized import small_groups_allowed
from support.sglang_families import CLEAN
from support.sglang_formats import EXPERTS, SHARED
from support.sglang_fp8 import one_an_expert, with_fp8_blocks
from support.sglang_runs import Case
from support.sglang_sizes import widened

# Those of the other tests, whose odd sizes show every mix-up, and those that every group size divides.
Sizes = Literal["odd", "wide"]
# "HF": the release, or what `quantize` makes of it. "Megatron": that is streamed, or `convert --quantize` makes INT4.
Way = Literal["HF", "Megatron"]

GROUPS = (32, 64, 128, "channel")
GRIDS: dict[str, dict[str, Any]] = {
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


@dataclass(frozen=True)
class Cell:
    """A test model in one of two sizes, a format (BF16, FP8 or a key of INT4) and the way it was made."""

    model: str
    sizes: Sizes
    format: str
    way: Way

    def __str__(self) -> str:
        return f"{self.sizes} {self.model}, {self.format} from {self.way}"

    @property
    def block(self) -> int:
        """Rows and columns of an FP8 block: 128, as in the releases, where the sizes allow it."""
        return 128 if self.sizes == "wide" else 8 if self.model.startswith(WITH_72_INPUTS) else 16

    @property
    def scheme(self) -> dict[str, Any]:
        """What `int4_scheme` is given: also what must stay unpacked, by the refusals that say so."""
        ignore: tuple[str, ...] = ()
        if self.sizes == "odd" and self.model.startswith(WITH_72_INPUTS):
            ignore = (EXPERTS,)
        elif self.format.endswith("zero points") and self.model.startswith("glm4_moe") and "lite" not in self.model:
            ignore = (SHARED,)
        return INT4[self.format] | {"ignore": ignore}


def every_cell() -> Iterator[Cell]:
    """Those of a model and its sizes one after the other. ckptkit writes no FP8, so it only comes from HF."""
    for model in CLEAN:
        for sizes in ("odd", "wide"):
            yield Cell(model, sizes, BF16, "HF")
            yield Cell(model, sizes, BF16, "Megatron")
            yield Cell(model, sizes, FP8, "HF")
            for form in INT4:
                yield Cell(model, sizes, form, "HF")
                yield Cell(model, sizes, form, "Megatron")


def checkpoint(cell: Cell, root: Path, reader: str = "sglang") -> Case:
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
    readers: dict[str, Any] = {"readers": (reader,)} if named else {}
    with small_groups_allowed():
        if cell.way == "HF":
            quantize(release, target, int4_scheme(**cell.scheme), **readers)
        else:
            convert(megatron, target, quantize=int4_scheme(**cell.scheme), **readers)
    return Case(target)


def values(case: Case) -> dict[str, int]:
    """The bytes of every tensor of a case's values, by the safetensors library alone."""
    return {name: tensor.nbytes for name, tensor in models.tensors(case.source or case.checkpoint).items()}
