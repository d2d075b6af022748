"""Megatron's parallel sizes, and checks that a model divides over them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.pipeline import Pipeline, count_chunks
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import Sizes


@dataclass(frozen=True)
class ParallelSizes(Sizes):
    """All parallel sizes of a Megatron launch.

    `vpp`: number of model chunks per rank. `cp`: context parallel size; its ranks hold copies of the weights. `first`,
    `last`, `embedding`, `loss` and `layout` distribute the layers like in `Pipeline`; by default evenly.
    """

    vpp: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: str | None = None
    cp: int = 1

    @property
    def world(self) -> int:
        """The smallest number of ranks that Megatron accepts.

        `initialize_model_parallel` requires a multiple of tp x cp x pp (dense part) and of etp x ep x pp (experts).
        """
        return self.pp * math.lcm(self.tp * self.cp, self.etp * self.ep)

    @property
    def even(self) -> bool:
        """Whether every stage has the same number of layers."""
        uneven = (self.first, self.last, self.layout)
        return all(one is None for one in uneven) and not (self.embedding or self.loss)

    def __str__(self) -> str:
        more = "".join(
            f" {name}{size}"
            for name, size in (("CP", self.cp), ("EP", self.ep), ("ETP", self.etp), ("VPP", self.vpp))
            if size > 1
        )
        ends = (("first", self.first), ("last", self.last))
        stages = "".join(f", {name} stage {layers} layers" for name, layers in ends if layers is not None)
        stages += "".join(f", {what} counts as a layer" for what in ("embedding", "loss") if getattr(self, what))
        return f"TP{self.tp} PP{self.pp}{more}{stages}{f', {self.layout}' if self.layout else ''}"

    def pipeline(self, dims: ModelDims) -> Pipeline:
        """The distribution of a model's layers."""
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
    """The default expert tensor parallel size: `tp` (Megatron's default), but 1 with expert parallelism.

    Launch scripts of MoE models then set it to 1, and it keeps the number of ranks small.
    """
    return tp if ep == 1 else 1


def with_remainder(sizes: ParallelSizes, layers: int) -> ParallelSizes:
    """Gives the last pipeline stage fewer layers if the layers do not divide, like slime.

    Source: its `tools/convert_hf_to_torch_dist.py`: every stage but the last has ceil(layers / pp) layers.
    """
    last = layers - math.ceil(layers / sizes.pp) * (sizes.pp - 1)
    uneven = sizes.even and layers % sizes.pp and sizes.vpp == 1 and last > 0
    return replace(sizes, last=last) if uneven else sizes


def with_chunks(sizes: ParallelSizes) -> ParallelSizes:
    """Sets `vpp` from a layout, like Megatron-LM's `validate_args`: the number of its chunks over `pp`.

    Sizes without a layout, or with one that does not divide, are unchanged. Raises CkptkitError for an invalid layout.
    """
    if sizes.layout is None or sizes.vpp > 1:
        return sizes
    chunks = count_chunks(sizes.layout)
    return sizes if chunks % sizes.pp else replace(sizes, vpp=chunks // sizes.pp)


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of the embedding as Megatron-LM pads them: to a multiple of 128 x tp (`make_vocab_size_divisible_by`)."""
    return math.ceil(vocab / (128 * tp)) * 128 * tp


@dataclass(frozen=True)
class Refusal:
    """Why Megatron rejects a model at the parallel size `option` (tp, ep or etp), and the fix."""

    option: str
    message: str
    expected: str
    actual: str
    hint: str


def refusals(dims: ModelDims, sizes: ParallelSizes) -> Iterator[Refusal]:
    """All reasons except layers why Megatron cannot divide a model over these sizes.

    Tensor parallel ranks may be a multiple of query groups: each rank then holds a part of a group's rows. Source:
    megatron-core's `TransformerConfig`, `Attention` and parallel linear layers.
    """
    tp, ep, etp = sizes.tp, sizes.ep, sizes.etp
    yield from _undivided("num_attention_heads", "attention heads", dims.heads, "tp", tp)
    if tp % dims.groups == 0:
        rows = dims.head_dim * (dims.heads * (2 if dims.attention_gate else 1) + 2 * dims.groups)
        yield from [] if dims.mla else _undivided("rows of linear_qkv", "rows of linear_qkv", rows, "tp", tp)
    elif not dims.mla:
        yield from _undivided("num_key_value_heads", "query groups", dims.groups, "tp", tp)
    if dims.linear:
        yield from _undivided("linear_num_key_heads", "key heads of linear attention", dims.linear.key_heads, "tp", tp)
    if dims.mamba:  # the groups divide the heads
        yield from _undivided("n_groups", "groups of the Mamba mixers", dims.mamba.groups, "tp", tp)
    if dims.dense:
        yield from _undivided("intermediate_size", "rows of the dense MLP", dims.ffn, "tp", tp)
    if not dims.experts:
        if ep > 1:
            message, hint = f"--ep {ep}, but this model has no experts", "remove --ep: the model is dense"
            yield Refusal(
                "ep", message, f"a number of experts that is divisible by ep = {ep}", "the number of experts = 0", hint
            )
        return
    yield from _undivided("moe_intermediate_size", "rows of an expert", dims.expert_ffn, "etp", etp)
    yield from _undivided("the shared experts' size", "rows of the shared experts", dims.shared_ffn, "tp", tp)
    yield from _undivided("the number of experts", "experts", dims.experts, "ep", ep)
    if dims.mlp_bias and etp > 1:
        message, hint = "the experts of this model have biases", f"pass --etp 1{_IN_A_LAUNCH}"
        yield Refusal("etp", f"--etp {etp}, but {message}", f"etp = 1, because {message}", f"etp = {etp}", hint)


_IN_A_LAUNCH = " (in a launch script --expert-tensor-parallel-size, which defaults to tp)"


def _undivided(setting: str, what: str, size: int, option: str, ranks: int) -> Iterator[Refusal]:
    """The refusal of a size (`setting` in a config, `what` in messages) that does not divide over the ranks."""
    if size % ranks:
        message = f"{size} {what} are not divisible by --{option} {ranks}"
        hint = f"choose a --tp that divides {size}" if option == "tp" else f"choose an --{option} that divides {size}"
        hint += _IN_A_LAUNCH if option == "etp" else ""
        yield Refusal(option, message, f"{setting} divisible by {option} = {ranks}", f"{setting} = {size}", hint)


def check_sizes(sizes: ParallelSizes, dims: ModelDims) -> None:
    """Raises CkptkitError, naming both numbers, if a model does not divide over these sizes."""
    for refusal in refusals(dims, sizes):
        raise CkptkitError(refusal.message, refusal.hint)
    chunks = sizes.pp * sizes.vpp
    if sizes.even and dims.layers % chunks:
        option = "--pp" if sizes.vpp == 1 else "--pp x --vpp"
        hint = f"choose a {option} that divides {dims.layers}"
        raise CkptkitError(f"{dims.layers} layers are not divisible by {option} {chunks}", hint)
    sizes.pipeline(dims).stages  # noqa: B018 - a cached property that raises
