"""Reads two checkpoints in one pass: what each side holds under a name, with digests instead of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.progress import progress
from ckptkit.core.specs import TensorSpec, summarize
from verify.evidence.compare import TensorDiff, common_dtype, compare
from verify.evidence.extremes import digest_of, same_bytes
from verify.evidence.folding import parts_apart
from verify.evidence.moved import Stages, explain_moves, group_pairs
from verify.evidence.reading import threads
from verify.evidence.values import common_groups

if TYPE_CHECKING:
    from torch import Tensor

State = Literal["equal", "cast", "differing", "only_a", "only_b", "unread"]
# Identifies equal content: the shape, and the digest of the bytes.
Content = tuple[tuple[int, ...], bytes]


@dataclass(frozen=True, slots=True)
class Pair:
    """What both sides hold under a name; None: nothing."""

    name: str
    a: TensorSpec | None
    b: TensorSpec | None
    content_a: Content | None  # in the narrower dtype, where the dtypes differ
    content_b: Content | None
    state: State
    constant: bool = False  # every element of a side is the same number: equal bits under another name prove nothing
    distance: TensorDiff | None = None  # of differing tensors of one shape

    @property
    def nbytes(self) -> int:
        """Bytes that were read for it."""
        return sum(spec.nbytes for spec in (self.a, self.b) if spec)


def pairs_of(a: Checkpoint, b: Checkpoint) -> Iterator[Pair]:
    """Yields a pair for each name of either side, those of `a` first. Both are read once, a few groups at a time.

    Raises CkptkitError as reading does.
    """
    names_a, names_b = a.specs, b.specs
    both = list(common_groups(a, b))
    rest = [left for group in b.groups if (left := tuple(name for name in group if name not in names_a))]
    sizes = [sum(names_a[name].nbytes for name in group) for group in both]
    sizes += [sum(names_b[name].nbytes for name in group) // 2 for group in rest]
    total = sum(spec.nbytes for specs in (names_a, names_b) for spec in specs.values())
    look = partial(_look, a, b, names_a, names_b)
    with progress("comparing", total) as advance, threads(max(sizes, default=0)) as pool:
        for pairs in pool.map(look, [*both, *rest]):
            advance(sum(pair.nbytes for pair in pairs))
            yield from pairs


def pairs_of_headers(a: Checkpoint, b: Checkpoint) -> Iterator[Pair]:
    """The same by names, shapes and dtypes alone: what both sides hold in one shape is `unread`."""
    for name in {**a.specs, **b.specs}:
        here, there = a.specs.get(name), b.specs.get(name)
        state: State = "only_a" if there is None else "only_b" if here is None else "unread"
        if here and there and here.shape != there.shape:
            state = "differing"
        yield Pair(name, here, there, None, None, state)


def _look(
    a: Checkpoint,
    b: Checkpoint,
    specs_a: Mapping[str, TensorSpec],
    specs_b: Mapping[str, TensorSpec],
    names: Sequence[str],
) -> list[Pair]:
    """The pairs of names that are read together."""
    left = a.read([name for name in names if name in specs_a])
    right = b.read([name for name in names if name in specs_b])
    return [_pair(name, specs_a.get(name), specs_b.get(name), left.get(name), right.get(name)) for name in names]


def _pair(name: str, spec_a: TensorSpec | None, spec_b: TensorSpec | None, a: Tensor | None, b: Tensor | None) -> Pair:
    if b is None and a is not None:
        return Pair(name, spec_a, None, content_of(a), None, "only_a", _constant(a))
    if a is None and b is not None:
        return Pair(name, None, spec_b, None, content_of(b), "only_b", _constant(b))
    assert a is not None  # a name of neither side is never looked at
    assert b is not None
    if same_bytes(a, b):
        content = content_of(a)
        return Pair(name, spec_a, spec_b, content, content, "equal")
    narrow_a, narrow_b = _narrowed(a, b)
    content_a, content_b = content_of(narrow_a), content_of(narrow_b)
    if content_a == content_b and narrow_a.dtype == narrow_b.dtype:
        return Pair(name, spec_a, spec_b, content_a, content_b, "cast")
    far = compare(name, a, b, common_dtype(a, b)) if a.shape == b.shape else None
    return Pair(name, spec_a, spec_b, content_a, content_b, "differing", _constant(a), far)


def _narrowed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype that they are compared in: the narrower one; of float16 and bfloat16, whichever is a cast."""
    import torch

    if (dtype := common_dtype(a, b)) is not None:
        return a.to(dtype), b.to(dtype)
    if {a.dtype, b.dtype} == {torch.float16, torch.bfloat16}:
        return (a.to(b.dtype), b) if same_bytes(a.to(b.dtype), b) else (a, b.to(a.dtype))
    return a, b


def content_of(tensor: Tensor) -> Content:
    """Shape and digest of a contiguous tensor."""
    return tuple(tensor.shape), digest_of(tensor)


def _constant(tensor: Tensor) -> bool:
    flat = tensor.reshape(-1)
    return not flat.numel() or bool((flat == flat[0]).all())


@dataclass(frozen=True)
class Move:
    """Tensors that one mistake moved."""

    text: str  # what was moved, for people
    names: tuple[str, ...]  # in A
    others: tuple[str, ...]  # for each the name in B that has its bits


def moved_names(pairs: Sequence[Pair]) -> dict[str, str]:
    """For each tensor of A that was moved the name in B that has its bits.

    A tensor that differs from its namesake may have the bits of any other name of B. One whose name B lacks counts as
    renamed where its bits stand under a name that A lacks. Constant tensors never count.
    """
    homes: dict[Content, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.content_b is not None:
            homes[pair.content_b].append(pair)
    moved: dict[str, str] = {}
    taken: set[str] = set()
    for pair in pairs:
        if pair.state not in ("differing", "only_a") or pair.constant or pair.content_a is None:
            continue
        found = [home for home in homes.get(pair.content_a, ()) if home.name != pair.name]
        if pair.state == "only_a":
            found = [home for home in found if home.state == "only_b" and home.name not in taken]
        if found:
            best = min(found, key=lambda home: _unlikely(pair, home))
            moved[pair.name] = best.name
            taken.add(best.name)
    return moved


def _unlikely(pair: Pair, home: Pair) -> tuple[bool, bool, int]:
    """Orders the names that have a tensor's bits: first the one in whose place it is, then those of its kind."""
    mutual = home.content_a is not None and home.content_a == pair.content_b
    return not mutual, home.state == "equal", parts_apart(pair.name, home.name)


def moves_of(pairs: Sequence[Pair], whose: Mapping[str, str]) -> Iterator[Move]:
    """Yields what `moved_names` found, what one mistake explains together; then tensors renamed in B."""
    differing = [pair.name for pair in pairs if pair.state == "differing"]
    stages = Stages.of_names([pair.name for pair in pairs])
    for move in explain_moves({name: whose.get(name) for name in differing}, stages, " in B"):
        yield _move(move.text, move.names, whose)
    placed = set(differing)
    for names in group_pairs({name: other for name, other in whose.items() if name not in placed}):
        yield _move(f"another name in B: {summarize(whose[name] for name in names)}", names, whose)


def _move(text: str, names: Sequence[str], whose: Mapping[str, str]) -> Move:
    return Move(text, tuple(names), tuple(whose[name] for name in names))
