"""Whether a model divides over the parallel sizes it is to be loaded with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from converters.config.dims import ModelDims


@dataclass(frozen=True)
class Indivisible:
    """A size of the model that a parallel size does not divide, and the next move."""

    what: str
    size: int
    parallel: str
    ranks: int
    hint: str


def indivisible(dims: ModelDims, tp: int, ep: int, etp: int | None = None) -> Iterator[Indivisible]:
    """Everything but layers that does not divide. Source: the checks of megatron-core's `TransformerConfig` and its parallel linears.

    `etp`: ranks that the matrices of an expert are cut over. None means Megatron's default without
    --expert-tensor-parallel-size, which is `tp`.
    """
    fewer_tp = "choose a --tp that divides it"
    etp = tp if etp is None else etp
    if dims.heads % tp:
        yield Indivisible("num_attention_heads", dims.heads, "tp", tp, fewer_tp)
    if not dims.mla and dims.groups % tp and tp % dims.groups:
        yield Indivisible("num_key_value_heads", dims.groups, "tp", tp, fewer_tp)
    if dims.linear and dims.linear.key_heads % tp:
        yield Indivisible("linear_num_key_heads", dims.linear.key_heads, "tp", tp, fewer_tp)
    if len(dims.dense) and dims.ffn % tp:
        yield Indivisible("intermediate_size", dims.ffn, "tp", tp, fewer_tp)
    if dims.experts and dims.expert_ffn % etp:
        hint = "give an --expert-tensor-parallel-size that divides it, such as 1; a launch without one takes that of tp"
        yield Indivisible("moe_intermediate_size", dims.expert_ffn, "etp", etp, hint)
    if dims.experts and dims.shared_ffn % tp:
        yield Indivisible("the shared experts' size", dims.shared_ffn, "tp", tp, fewer_tp)
    if dims.experts and dims.experts % ep:
        yield Indivisible("the number of experts", dims.experts, "ep", ep, "choose an --ep that divides it")
    if not dims.experts and ep > 1:
        yield Indivisible("the number of experts", 0, "ep", ep, "a dense model has no experts: leave --ep out")
