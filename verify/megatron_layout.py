"""Parallel sizes to load Megatron with, and whether a model of given dimensions can be cut that way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptkit.errors import CkptkitError
from converters.dims import ModelDims


@dataclass(frozen=True)
class ParallelSizes:
    """Tensor, pipeline, expert and virtual pipeline parallel sizes; `etp` is the tensor parallel size inside experts."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    @property
    def world(self) -> int:
        """The smallest number of ranks that Megatron accepts.

        `initialize_model_parallel` wants a multiple of tp x pp for the dense part and of etp x ep x pp for the experts.
        """
        return self.pp * math.lcm(self.tp, self.etp * self.ep)

    def __str__(self) -> str:
        more = "".join(f" {name}{size}" for name, size in (("EP", self.ep), ("ETP", self.etp), ("VPP", self.vpp)) if size > 1)
        return f"TP{self.tp} PP{self.pp}{more}"


def default_etp(tp: int, ep: int) -> int:
    """Expert tensor parallel size when none is given: Megatron's own default (that of `tp`), but 1 with expert parallelism.

    Launch scripts of MoE models set it to 1 there, and it keeps the number of ranks small.
    """
    return tp if ep == 1 else 1


def check_sizes(sizes: ParallelSizes, dims: ModelDims) -> None:
    """Raises CkptkitError when this model cannot be cut into these parts, naming both numbers."""
    cuts: list[tuple[str, int, str, int]] = [
        ("query groups", dims.groups, "--tp", sizes.tp),
        ("attention heads", dims.heads, "--tp", sizes.tp),
        ("layers", dims.layers, "--pp" if sizes.vpp == 1 else "--pp x --vpp", sizes.pp * sizes.vpp),
    ]
    if len(dims.dense):
        cuts.append(("rows of the dense MLP", dims.ffn, "--tp", sizes.tp))
    if dims.experts:
        cuts += [("experts", dims.experts, "--ep", sizes.ep), ("rows of an expert", dims.expert_ffn, "--etp", sizes.etp)]
    if dims.shared_ffn:
        cuts.append(("rows of the shared experts", dims.shared_ffn, "--tp", sizes.tp))
    for what, count, option, size in cuts:
        if count % size:
            raise CkptkitError(f"{count} {what} do not divide by {option} {size}", f"choose a {option} that divides {count}")
    if sizes.ep > 1 and not dims.experts:
        raise CkptkitError(f"--ep {sizes.ep}, but this model has no experts", "leave --ep out")


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of the embedding as Megatron-LM pads them by default: to a multiple of 128 x tp (`make_vocab_size_divisible_by`)."""
    return math.ceil(vocab / (128 * tp)) * 128 * tp
