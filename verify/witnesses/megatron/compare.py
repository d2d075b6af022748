"""Every parameter of a Megatron rank against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from ckptkit.core.checkpoint import Checkpoint
from converters.planner import Rule
from verify.witnesses.megatron.diagnosis import Siblings, diagnose
from verify.witnesses.megatron.job import TensorSeen
from verify.witnesses.megatron.slices import Position, compare


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
                seen = compare(local, rules[name], whole, here, at)
                if seen.verdict == "differs":
                    diagnosis = diagnose(rules[name], whole, here, at)
                    seen = replace(seen, diagnosis=diagnosis, origins=siblings.whose(name, here))
                yield seen
