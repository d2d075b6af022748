"""Expected slices of each parameter of a Megatron rank, without Megatron's resharding, and causes of differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ckptkit.converters.megatron.module_names import CUT_IN_LOCAL_SPEC
from ckptkit.converters.ops.basic import Copy
from ckptkit.converters.planner import Rule
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.verify.evidence.compare import compare, rows_named
from ckptkit.verify.evidence.extremes import digest_of, same_bytes
from ckptkit.verify.evidence.folding import count_differing_parts, pattern_of
from ckptkit.verify.witnesses.loading.bits import poisoned, unequal
from ckptkit.verify.witnesses.megatron.job import TensorSeen

_READ_BYTES = 4 << 30  # of the reference, to find the tensor in the wrong place


@dataclass(frozen=True)
class Position:
    """Tensor parallel rank and size, those inside experts, and the rank's experts."""

    tp_rank: int
    tp: int
    etp_rank: int
    etp: int
    experts: range
    local_spec: bool = False  # its layers have Megatron's own spec, not Transformer Engine's

    @staticmethod
    def here(experts: int, local_spec: bool = False) -> Position:
        """The position of this process by Megatron's own numbers, in a model with so many experts."""
        from megatron.core import parallel_state

        each = experts // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * each
        return Position(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            range(first, first + each),
            local_spec,
        )


def layers_of_chunk(chunk: Any) -> tuple[int, ...]:
    """Global numbers of the layers of a GPTModel, from 0, by Megatron's own `layer_number`, which begins at 1."""
    return tuple(int(layer.layer_number) - 1 for layer in chunk.decoder.layers)


def ranks_of(rule: Rule, at: Position) -> tuple[int, int]:
    """The tensor parallel rank and size that divide this tensor; they differ inside experts."""
    return (at.etp_rank, at.etp) if ".experts.experts." in rule.megatron else (at.tp_rank, at.tp)


def expected_slice(rule: Rule, whole: Tensor, local: Tensor, at: Position) -> tuple[Tensor, Tensor]:
    """The part of a global tensor that a rank must hold, in the dtype of `local`, and that part of `local`.

    Both have the same shape unless something is wrong. Rows of padding in the vocabulary are left out.
    """
    rank, size = ranks_of(rule, at)
    if rule.mapping.vocab:
        rows, vocab = local.shape[0], rule.megatron_shape[0]
        part = whole[:vocab][rank * rows : (rank + 1) * rows]
        return part.to(local.dtype), local[: part.shape[0]]
    op = Copy(0) if at.local_spec and CUT_IN_LOCAL_SPEC.fullmatch(rule.megatron) else rule.mapping.op
    return op.shard(whole, rank, size).to(local.dtype), local


def compare_all(
    held: Mapping[str, Tensor],
    name_of: Callable[[str], str],
    rules: Mapping[str, Rule],
    reference: Checkpoint,
    at: Position,
) -> Iterator[TensorSeen]:
    """Compares every parameter of a rank (`held`, by local name) with the reference, read group by group."""
    locals_of: dict[str, list[str]] = {}
    for local, tensor in held.items():
        name = name_of(local)
        if name in rules and name in reference.specs:
            locals_of.setdefault(name, []).append(local)
        else:
            yield TensorSeen(local, name, "unknown", tensor.nbytes, tensor.numel())
    siblings = Siblings(rules, reference, at)
    for group in reference.groups:
        names = [name for name in group if name in locals_of]
        for name, whole in (reference.read(names) if names else {}).items():
            for local in locals_of[name]:
                here = held[local].cpu()
                seen = compare_slice(local, rules[name], whole, here, at)
                if seen.verdict == "differs":
                    diagnosis = diagnose(rules[name], whole, here, at)
                    seen = replace(seen, diagnosis=diagnosis, origins=siblings.find(name, here))
                yield seen


def compare_slice(local_name: str, rule: Rule, whole: Tensor, local: Tensor, at: Position) -> TensorSeen:
    """Compares one parameter (on the CPU) with its prediction, bit for bit."""
    expected, held = expected_slice(rule, whole, local, at)
    dtype = str(local.dtype).removeprefix("torch.")
    seen = TensorSeen(local_name, rule.megatron, "equal", held.nbytes, held.numel(), dtype=dtype)
    if same_bytes(expected.contiguous(), held.contiguous()):
        return seen
    result = compare(rule.megatron, held, expected, held.dtype)
    seen = replace(seen, verdict="differs", differing=result.unequal)
    if result.same_shape and poisoned(local).all():
        return replace(seen, verdict="unwritten")
    return replace(seen, largest=result.largest) if result.same_shape else seen


def diagnose(rule: Rule, whole: Tensor, local: Tensor, at: Position) -> str:
    """The rows of `local` that differ from its slice of the global tensor, and the source of their values if known."""
    expected, held = expected_slice(rule, whole, local, at)
    if expected.shape != held.shape:
        return f"shape {list(held.shape)}, not {list(expected.shape)}"
    rank, size = ranks_of(rule, at)
    cut = size > 1 and expected.shape != whole.shape
    place = [f"in the slice of tensor parallel rank {rank} of {size}"] if cut else []
    return ": ".join([*place, *_find_cause(rule, whole, expected, held, at)])


def _find_cause(rule: Rule, whole: Tensor, expected: Tensor, held: Tensor, at: Position) -> Iterator[str]:
    # An intermediate smaller dtype, if it explains every difference.
    for dtype in (torch.bfloat16, torch.float16) if expected.dtype == torch.float32 else ():
        if _equal(expected.to(dtype).float(), held):
            yield f"the source's values rounded to {str(dtype).removeprefix('torch.')}"
            return
    rank, size = ranks_of(rule, at)
    for other in range(size if expected.shape != whole.shape else 0):
        if _equal(expected_slice(rule, whole, held, replace(at, tp_rank=other, etp_rank=other))[0], held):
            yield f"the slice of tensor parallel rank {other}"
            return
    wrong = unequal(expected, held).reshape(len(held), -1).any(dim=1) if held.dim() else None
    if wrong is not None and not wrong.all():
        first = rank * len(held) if rule.mapping.vocab else 0
        rows = rows_named((wrong.nonzero().flatten() + first).tolist())
        yield f"{'as before the load' if poisoned(held[wrong]).all() else 'other values'} in {rows}"


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not unequal(one, other).any()


@dataclass
class Siblings:
    """Finds the reference tensors that have a parameter's values, among the first `_READ_BYTES` that it reads."""

    rules: Mapping[str, Rule]
    reference: Checkpoint
    at: Position
    digests: dict[str, bytes] = field(default_factory=dict)
    read: int = 0

    def find(self, name: str, local: Tensor) -> tuple[str, ...]:
        """The closest tensors of the same kind, by name, that have the values `local`; empty for a constant."""
        if local.numel() and not unequal(local, local.flatten()[0].expand(local.shape)).any():
            return ()
        digest = digest_of(local.contiguous())
        matches = (tuple(one for one in tier if self._digest(one, local) == digest) for tier in self._tiers(name))
        return next(filter(None, matches), ())

    def _tiers(self, name: str) -> Iterator[list[str]]:
        """Candidates, the likeliest first: one number apart, then all of the kind, then norms of another kind."""
        stored = [one for one in self.rules if one in self.reference.specs]
        pattern, shape = pattern_of(name), self.rules[name].megatron_shape
        siblings = [one for one in stored if one != name and pattern_of(one) == pattern]
        yield [one for one in siblings if count_differing_parts(name, one) == 1]
        yield [one for one in siblings if count_differing_parts(name, one) != 1]
        if "norm" in name:
            norms = [one for one in stored if "norm" in one and pattern_of(one) != pattern]
            yield [one for one in norms if self.rules[one].megatron_shape == shape]

    def _digest(self, name: str, local: Tensor) -> bytes | None:
        if name not in self.digests:
            if self.read > _READ_BYTES:
                return None
            self.read += self.reference.specs[name].nbytes
            expected, held = expected_slice(self.rules[name], self.reference.read([name])[name], local, self.at)
            self.digests[name] = digest_of(expected.contiguous()) if expected.shape == held.shape else b""
        return self.digests[name]
