"""What each parameter of a Megatron rank must hold, predicted from global tensors, and whether it does.

Megatron's resharding is never asked, only its numbers of layers, experts and ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ckptkit.core.checkpoint import Checkpoint
from converters.megatron.module_names import CUT_IN_LOCAL_SPEC
from converters.ops.basic import Copy
from converters.planner import Rule
from verify.witnesses.bits import poisoned, unequal
from verify.witnesses.megatron.job import TensorSeen

_LAYER = re.compile(r"(decoder\.layers)\.(\d+)\.(.+)")


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


def expected_slice(rule: Rule, whole: Tensor, local: Tensor, at: Position) -> tuple[Tensor, Tensor]:
    """The part of a global tensor that a rank must hold, in the dtype of `local`, and that part of `local`.

    Both are the same shape unless something is wrong. Rows of padding in the vocabulary are left out.
    """
    inside_expert = ".experts.experts." in rule.megatron
    rank, size = (at.etp_rank, at.etp) if inside_expert else (at.tp_rank, at.tp)
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
    differing = int(unequal(expected, held).sum())
    if not differing:
        return seen
    if poisoned(local).all():
        return replace(seen, verdict="unwritten", differing=differing)
    largest = float((expected.double() - held.double()).abs().max())
    return replace(seen, verdict="differs", differing=differing, largest=largest)


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
    for group in reference.groups:
        names = [name for name in group if name in wanted]
        for name, whole in (reference.read(names) if names else {}).items():
            for local in wanted[name]:
                seen = compare(local, rules[name], whole, held[local].cpu(), at)
                yield (
                    seen
                    if seen.verdict != "differs"
                    else replace(seen, layer=_whose_layer(seen, rules, held[local].cpu(), reference, at))
                )


_SMALL = 1 << 20  # elements up to which it is worth looking through all layers for a tensor's values


def _whose_layer(
    seen: TensorSeen, rules: Mapping[str, Rule], local: Tensor, reference: Checkpoint, at: Position
) -> int | None:
    """The one other layer whose values stand here; None when there is none, several, or the tensor is large."""
    match = _LAYER.fullmatch(seen.name)
    if not match or local.numel() > _SMALL or local.dim() < 2:
        return None
    others = [
        name
        for name in reference.specs
        if (other := _LAYER.fullmatch(name)) and other[3] == match[3] and name in rules and name != seen.name
    ]
    found = []
    for name in others:
        expected, held = expected_slice(rules[name], reference.read([name])[name], local, at)
        if expected.shape == held.shape and not unequal(expected, held).any():
            found.append(int(_LAYER.fullmatch(name)[2]))  # type: ignore[index]
    return found[0] if len(found) == 1 else None
