"""Parallel sizes to load Megatron with, and whether a model of given dimensions can be cut that way."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckptkit.core.errors import CkptkitError
from converters.config.dims import ModelDims
from converters.megatron.pipeline import Pipeline


@dataclass(frozen=True)
class ParallelSizes:
    """Tensor, pipeline, expert and virtual pipeline parallel sizes; `etp` is the tensor parallel size inside experts.

    `first`, `last`, `embedding`, `loss` and `layout` say how the layers are distributed over the pipeline, as in
    `converters.megatron.pipeline.Pipeline`; without them evenly.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: str | None = None

    @property
    def world(self) -> int:
        """The smallest number of ranks that Megatron accepts.

        `initialize_model_parallel` wants a multiple of tp x pp for the dense part and of etp x ep x pp for the experts.
        """
        return self.pp * math.lcm(self.tp, self.etp * self.ep)

    def __str__(self) -> str:
        more = "".join(
            f" {name}{size}" for name, size in (("EP", self.ep), ("ETP", self.etp), ("VPP", self.vpp)) if size > 1
        )
        stages = "".join(
            f", {name} stage {layers} layers"
            for name, layers in (("first", self.first), ("last", self.last))
            if layers is not None
        )
        return f"TP{self.tp} PP{self.pp}{more}{stages}{f', {self.layout}' if self.layout else ''}"

    def pipeline(self, dims: ModelDims) -> Pipeline:
        """How the layers of a model are distributed."""
        return Pipeline(
            dims.layers,
            self.pp,
            self.vpp,
            self.first,
            self.last,
            self.embedding,
            self.loss,
            self.layout,
            dims.mtp_layers,
        )


def default_etp(tp: int, ep: int) -> int:
    """Expert tensor parallel size when none is given: Megatron's own default (that of `tp`), but 1 with expert parallelism.

    Launch scripts of MoE models set it to 1 there, and it keeps the number of ranks small.
    """
    return tp if ep == 1 else 1


def with_remainder(sizes: ParallelSizes, layers: int) -> ParallelSizes:
    """The same sizes, with what is left over on the last pipeline stage where the layers do not divide: slime's rule.

    Its `tools/convert_hf_to_torch_dist.py`: every stage but the last has ceil(layers / pp) layers.
    """
    last = layers - math.ceil(layers / sizes.pp) * (sizes.pp - 1)
    uneven = layers % sizes.pp and sizes.vpp == 1 and last > 0
    return replace(sizes, last=last) if uneven else sizes


def check_sizes(sizes: ParallelSizes, dims: ModelDims) -> None:
    """Raises CkptkitError when this model cannot be cut into these parts, naming both numbers."""
    cuts: list[tuple[str, int, str, int]] = [
        # Latent attention has no query groups.
        *([] if dims.mla else [("query groups", dims.groups, "--tp", sizes.tp)]),
        ("attention heads", dims.heads, "--tp", sizes.tp),
    ]
    if sizes.first is None and sizes.last is None and sizes.layout is None and not (sizes.embedding or sizes.loss):
        cuts.append(("layers", dims.layers, "--pp" if sizes.vpp == 1 else "--pp x --vpp", sizes.pp * sizes.vpp))
    if len(dims.dense):
        cuts.append(("rows of the dense MLP", dims.ffn, "--tp", sizes.tp))
    if dims.experts:
        cuts += [
            ("experts", dims.experts, "--ep", sizes.ep),
            ("rows of an expert", dims.expert_ffn, "--etp", sizes.etp),
        ]
    if dims.shared_ffn:
        cuts.append(("rows of the shared experts", dims.shared_ffn, "--tp", sizes.tp))
    for what, count, option, size in cuts:
        if count % size:
            raise CkptkitError(
                f"{count} {what} do not divide by {option} {size}", f"choose a {option} that divides {count}"
            )
    if sizes.ep > 1 and not dims.experts:
        raise CkptkitError(f"--ep {sizes.ep}, but this model has no experts", "leave --ep out")
    if sizes.etp > 1 and dims.experts and dims.mlp_bias:
        raise CkptkitError(
            f"--etp {sizes.etp}, but the experts of this model have biases", "Megatron has those only with --etp 1"
        )
    sizes.pipeline(dims).stages  # noqa: B018 - a cached property that raises


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of the embedding as Megatron-LM pads them by default: to a multiple of 128 x tp (`make_vocab_size_divisible_by`)."""
    return math.ceil(vocab / (128 * tp)) * 128 * tp
