"""What each parameter of a Megatron rank must hold, predicted from global tensors, and what it holds instead.

Megatron's resharding is never asked, only its numbers of layers, experts and ranks.
"""

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

_READ_BYTES = 4 << 30  # of the reference, in search of the tensor whose values stand in the wrong place


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

    @staticmethod
    def here(experts: int, local_spec: bool = False) -> Position:
        """Of this process, by Megatron's own count, where the model has so many experts in all."""
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
    """Global numbers of the layers of a GPTModel, from 0, by Megatron's own count (its `layer_number` begins at 1)."""
    return tuple(int(layer.layer_number) - 1 for layer in chunk.decoder.layers)


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


def compare_all(
    held: Mapping[str, Tensor],
    name_of: Callable[[str], str],
    rules: Mapping[str, Rule],
    reference: Checkpoint,
    at: Position,
) -> Iterator[TensorSeen]:
    """Every parameter of a rank (`held`, by local name) against the reference, read group by group."""
    wanted: dict[str, list[str]] = {}
    for local, tensor in held.items():
        name = name_of(local)
        if name in rules and name in reference.specs:
            wanted.setdefault(name, []).append(local)
        else:
            yield TensorSeen(local, name, "unknown", tensor.nbytes, tensor.numel())
    siblings = Siblings(rules, reference, at)
    for group in reference.groups:
        names = [name for name in group if name in wanted]
        for name, whole in (reference.read(names) if names else {}).items():
            for local in wanted[name]:
                here = held[local].cpu()
                seen = compare_slice(local, rules[name], whole, here, at)
                if seen.verdict == "differs":
                    diagnosis = diagnose(rules[name], whole, here, at)
                    seen = replace(seen, diagnosis=diagnosis, origins=siblings.whose(name, here))
                yield seen


def compare_slice(local_name: str, rule: Rule, whole: Tensor, local: Tensor, at: Position) -> TensorSeen:
    """Holds one parameter (on the CPU) against its prediction, bit for bit."""
    expected, held = expected_slice(rule, whole, local, at)
    dtype = str(local.dtype).removeprefix("torch.")
    seen = TensorSeen(local_name, rule.megatron, "equal", held.nbytes, held.numel(), dtype=dtype)
    if same_bytes(expected.contiguous(), held.contiguous()):
        return seen
    far = compare(rule.megatron, held, expected, held.dtype)
    if not far.same_shape:
        return replace(seen, verdict="differs", differing=far.unequal)
    if poisoned(local).all():
        return replace(seen, verdict="unwritten", differing=far.unequal)
    return replace(seen, verdict="differs", differing=far.unequal, largest=far.largest)


def diagnose(rule: Rule, whole: Tensor, local: Tensor, at: Position) -> str:
    """Which rows of `local` are not those of its slice of `whole`, and what they hold where that can be told.

    Both have the shapes of `expected_slice`. Rows of the vocabulary are numbered as in the whole tensor.
    """
    expected, held = expected_slice(rule, whole, local, at)
    if expected.shape != held.shape:
        return f"shape {list(held.shape)}, not {list(expected.shape)}"
    rank, size = ranks_of(rule, at)
    cut = size > 1 and expected.shape != whole.shape
    where = [f"in the slice of tensor parallel rank {rank} of {size}"] if cut else []
    return ": ".join([*where, *_instead(rule, whole, expected, held, at)])


def _instead(rule: Rule, whole: Tensor, expected: Tensor, held: Tensor, at: Position) -> Iterator[str]:
    # A smaller dtype that the values went through, if that explains every difference.
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
    """Finds the tensors of the reference whose slice a parameter holds: of other layers, other experts, other norms.

    `digests` holds what was read so far; after `_READ_BYTES` no more is read, and nothing is found.
    """

    rules: Mapping[str, Rule]
    reference: Checkpoint
    at: Position
    digests: dict[str, bytes] = field(default_factory=dict)
    read: int = 0

    def whose(self, name: str, local: Tensor) -> tuple[str, ...]:
        """Every tensor of the same kind whose slice is `local`, those closest by name alone; empty for a constant."""
        if local.numel() and not unequal(local, local.flatten()[0].expand(local.shape)).any():
            return ()
        wanted = digest_of(local.contiguous())
        for tier in self._tiers(name):
            if found := tuple(other for other in tier if self._digest(other, local) == wanted):
                return found
        return ()

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
