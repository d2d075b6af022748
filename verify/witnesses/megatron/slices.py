"""What each parameter of a Megatron rank must hold, predicted from global tensors, and whether it does.

Megatron's resharding is never asked, only its numbers of layers, experts and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from converters.megatron.module_names import CUT_IN_LOCAL_SPEC
from converters.ops.basic import Copy
from converters.planner import Rule
from verify.evidence.extremes import same_bytes
from verify.witnesses.loading.bits import poisoned, unequal
from verify.witnesses.megatron.job import TensorSeen


@dataclass(frozen=True)
class Position:
    """Where a rank stands: tensor parallel rank and size, those inside experts, and its first and last expert + 1.

    `local_spec`: its layers are those of Megatron's own spec, not Transformer Engine's.
    """

    tp_rank: int
    tp: int
    etp_rank: int
    etp: int
    experts: range
    local_spec: bool = False

    def of_rank(self, rank: int) -> Position:
        """The same with another tensor parallel rank, inside experts and outside."""
        return replace(self, tp_rank=rank, etp_rank=rank)


def ranks_of(rule: Rule, at: Position) -> tuple[int, int]:
    """The tensor parallel rank that cuts this tensor, and how many there are: inside experts others than outside."""
    return (at.etp_rank, at.etp) if ".experts.experts." in rule.megatron else (at.tp_rank, at.tp)


def expected_slice(rule: Rule, whole: Tensor, local: Tensor, at: Position) -> tuple[Tensor, Tensor]:
    """The part of a global tensor that a rank must hold, in the dtype of `local`, and that part of `local`.

    Both are the same shape unless something is wrong. Rows of padding in the vocabulary are left out.
    """
    rank, size = ranks_of(rule, at)
    if rule.mapping.vocab:
        rows, vocab = local.shape[0], rule.megatron_shape[0]
        part = whole[:vocab][rank * rows : (rank + 1) * rows]
        return part.to(local.dtype), local[: part.shape[0]]
    op = Copy(0) if at.local_spec and CUT_IN_LOCAL_SPEC.fullmatch(rule.megatron) else rule.mapping.op
    return op.shard(whole, rank, size).to(local.dtype), local


def compare(local_name: str, rule: Rule, whole: Tensor, local: Tensor, at: Position) -> TensorSeen:
    """Holds one parameter (on the CPU) against its prediction, bit for bit."""
    expected, held = expected_slice(rule, whole, local, at)
    dtype = str(local.dtype).removeprefix("torch.")
    seen = TensorSeen(local_name, rule.megatron, "equal", held.nbytes, held.numel(), dtype=dtype)
    if expected.shape != held.shape:
        return replace(seen, verdict="differs", differing=held.numel())
    if expected.is_contiguous() and held.is_contiguous() and same_bytes(expected, held):
        return seen
    differing = int(unequal(expected, held).sum())
    if not differing:
        return seen
    if poisoned(local).all():
        return replace(seen, verdict="unwritten", differing=differing)
    largest = float((expected.double() - held.double()).abs().max())
    return replace(seen, verdict="differs", differing=differing, largest=largest)
