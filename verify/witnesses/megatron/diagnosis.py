"""What a parameter holds instead of its slice: which rows are wrong, and whose values stand there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ckptkit.core.checkpoint import Checkpoint
from converters.ops.basic import GateUpInOne
from converters.planner import Rule
from verify.evidence.extremes import digest_of
from verify.evidence.folding import pattern_of
from verify.evidence.moved.moves import siblings_of
from verify.evidence.values import rows_named
from verify.witnesses.loading.bits import poisoned, unequal
from verify.witnesses.megatron.slices import Position, expected_slice, ranks_of

_READ_BYTES = 4 << 30  # of the reference, in search of the tensor whose values stand in the wrong place


@dataclass(frozen=True)
class Section:
    """Rows of a rank's parameter that come from one HF tensor: its name, the rows, and their numbers in the whole."""

    name: str
    rows: Tensor
    numbers: Tensor


def diagnose(rule: Rule, whole: Tensor, local: Tensor, at: Position) -> str:
    """Which part of `local` is not its slice of `whole`, and what stands there where that can be told.

    Both have the shapes of `expected_slice`. Rows are numbered as in the whole Megatron tensor.
    """
    expected, held = expected_slice(rule, whole, local, at)
    if expected.shape != held.shape:
        return f"shape {list(held.shape)}, not {list(expected.shape)}"
    rank, size = ranks_of(rule, at)
    cut = size > 1 and expected.shape != whole.shape
    where = f"in the slice of tensor parallel rank {rank} of {size}: " if cut else ""
    if rounded := _rounded(expected, held):
        return f"{where}the source's values rounded to {rounded}"
    if cut and (other := _of_other_rank(rule, whole, held, at)) is not None:
        return f"{where}the slice of tensor parallel rank {other}"
    parts = list(_parts(rule, whole, expected, held, at))
    return where + ", ".join(parts) if parts or cut else ""


def _rounded(expected: Tensor, held: Tensor) -> str | None:
    """The smaller dtype that the values went through, if that explains every difference."""
    for dtype in (torch.bfloat16, torch.float16):
        if expected.dtype == torch.float32 and not unequal(expected.to(dtype).float(), held).any():
            return str(dtype).removeprefix("torch.")
    return None


def _of_other_rank(rule: Rule, whole: Tensor, held: Tensor, at: Position) -> int | None:
    _, size = ranks_of(rule, at)
    for rank in range(size):
        other, _ = expected_slice(rule, whole, held, at.of_rank(rank))
        if other.shape == held.shape and not unequal(other, held).any():
            return rank
    return None


def _parts(rule: Rule, whole: Tensor, expected: Tensor, held: Tensor, at: Position) -> Iterator[str]:
    """Each run of wrong rows with what stands there; nothing where every row is wrong and nothing can be told."""
    wrong = unequal(expected, held).reshape(len(held), -1).any(dim=1) if held.dim() else torch.ones(1, dtype=torch.bool)
    sections = _sections(rule, whole, held, at)
    for section in sections:
        bad = wrong[section.rows]
        if not bad.any():
            continue
        named = rows_named(section.numbers[bad].tolist()) + (f" ({section.name})" if section.name else "")
        found = held[section.rows[bad]]
        if poisoned(found).all():
            yield f"as before the load in {named}"
        elif bad.all() and (other := _of_other_section(section, sections, expected, held)):
            yield f"the values of {other} in {named}"
        elif not wrong.all():
            yield f"other values in {named}"


def _of_other_section(section: Section, sections: Sequence[Section], expected: Tensor, held: Tensor) -> str | None:
    found = held[section.rows]
    for other in sections:
        same_rows = other is not section and len(other.rows) == len(section.rows)
        if same_rows and not unequal(expected[other.rows], found).any():
            return other.name
    return None


def _sections(rule: Rule, whole: Tensor, held: Tensor, at: Position) -> list[Section]:
    """The rows of a rank's parameter by the HF tensor that they are of; all as one where that is one."""
    numbers = _numbers(rule, whole, held, at)
    if numbers is None:
        everything = torch.arange(len(held)) if held.dim() else torch.arange(1)
        return [Section("", everything, everything)]
    names, parts = _split(rule, len(whole))
    found = []
    for name, part in zip(names, parts, strict=True):
        rows = torch.isin(numbers, part).nonzero().flatten()
        if len(rows):
            found.append(Section(name, rows, numbers[rows]))
    return found


def _numbers(rule: Rule, whole: Tensor, held: Tensor, at: Position) -> Tensor | None:
    """For each row of a rank's parameter its number in the whole tensor; None where the rows are not cut by rank."""
    if not held.dim() or rule.mapping.vocab:
        first = ranks_of(rule, at)[0] * len(held) if held.dim() else 0
        return torch.arange(first, first + len(held)) if held.dim() else None
    if held.dim() > 1 and held.shape[1:] != whole.shape[1:]:
        return torch.arange(len(held))
    places = torch.arange(len(whole)).reshape(-1, *[1] * (whole.dim() - 1))
    return expected_slice(rule, places, places, at)[0].flatten()


def _split(rule: Rule, rows: int) -> tuple[list[str], list[Tensor]]:
    """The numbers of the rows that each HF tensor of a rule becomes, with the module's name: `gate_proj`."""
    everything = torch.arange(rows).reshape(-1, 1)
    if isinstance(rule.mapping.op, GateUpInOne):
        return ["gate", "up"], [part.flatten() for part in everything.chunk(2)]
    if len(rule.hf) == 1:
        return [""], [everything.flatten()]
    modules = [name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] for name in rule.hf]
    return modules, [part.flatten() for part in rule.mapping.op.split(everything)]


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
        yield from siblings_of(name, stored)
        if "norm" in name:
            pattern, shape = pattern_of(name), self.rules[name].megatron_shape
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
