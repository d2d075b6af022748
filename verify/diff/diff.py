"""`diff`: compares two checkpoints of any formats, read in one pass, with digests instead of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.converters.planner import tied_head
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.installation import INSTALL_CONVERT, program_version
from ckptkit.core.progress import progress
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.side_files import is_own
from ckptkit.storage.fingerprint import require_unchanged
from ckptkit.verify.diff.result import Content, Diff, Pair, State, badness
from ckptkit.verify.diff.sides import Sides, config_or_empty, opened, supported
from ckptkit.verify.evidence.both_sides import SPARE, Both, BothSides, common_groups, threads
from ckptkit.verify.evidence.compare import common_dtype
from ckptkit.verify.evidence.compare import compare as compare_tensors
from ckptkit.verify.evidence.expected import fp32_names
from ckptkit.verify.evidence.extremes import digest_of, same_bytes
from ckptkit.verify.evidence.folding import by_key, parts_apart
from ckptkit.verify.evidence.moved import Moved, Stages, explain_moves, group_pairs

if TYPE_CHECKING:
    from torch import Tensor


def diff(a: str | Path, b: str | Path, *, hf: str | Path | None = None, exact: bool = False) -> Diff:
    """Compares two checkpoints, tensor by tensor under HF names; each may be HF, quantized HF, torch_dist or legacy.

    So are config.json and the files that loaders read next to the weights: a difference there is one of the model.
    `hf` gives the config of a Megatron checkpoint that has none beside it; without it, that of the other side does.
    `exact`: a tensor in another dtype is a difference even where a cast makes it equal. Without torch no values are
    compared, only names, shapes and dtypes. Raises CkptkitError where one cannot be opened or read. Memory holds a few
    groups of tensors, and of all others a digest.
    """
    sides = opened(a, b, hf)
    if find_spec("torch") is None:
        return _compare_headers(sides, str(a), str(b), exact)
    with require_unchanged([locate(a).path, locate(b).path], is_own):
        return compare_checkpoints(sides, str(a), str(b), exact=exact)


def compare_checkpoints(sides: Sides, a: str, b: str, *, exact: bool = False) -> Diff:
    """The same of two checkpoints that are open."""
    pairs = {pair.name: pair for pair in pairs_of(sides.a, sides.b)}
    if not pairs:
        raise CkptkitError(f"{a} and {b} hold no tensor", "check the paths")
    redundant = _redundant(sides, pairs)
    found = [pair for pair in pairs.values() if pair.name not in redundant]
    whose = moved_names(found)
    renamed = {other for name, other in whose.items() if pairs[name].state == "only_a"}
    left = [pair for pair in found if pair.name not in whose and pair.name not in renamed]
    cast = [pair for pair in left if pair.state == "cast"]
    return Diff(
        *(program_version(), a, b, sides.formats, exact),
        nbytes=sum(pair.nbytes for pair in pairs.values()),
        equal=[pair.name for pair in left if pair.state == "equal"],
        cast=cast,
        redundant=sorted(redundant),
        moves=list(moves_of(found, whose)),
        differing=sorted((pair for pair in left if pair.state == "differing"), key=badness, reverse=True),
        only_a=[pair for pair in left if pair.state == "only_a"],
        only_b=[pair for pair in left if pair.state == "only_b"],
        notes=[*sides.notes, *_rounded(sides.a, cast)],
        files=sides.files,
    )


def _compare_headers(sides: Sides, a: str, b: str, exact: bool) -> Diff:
    found: list[Pair] = []
    for name in {**sides.a.specs, **sides.b.specs}:
        here, there = sides.a.specs.get(name), sides.b.specs.get(name)
        state: State = "only_a" if there is None else "only_b" if here is None else "unread"
        if here and there and here.shape != there.shape:
            state = "differing"
        found.append(Pair(name, here, there, None, None, state))
    tied = {head[0] for head in _tied(sides)}
    note = f"values were not read: torch is not installed here: {INSTALL_CONVERT}"
    return Diff(
        *(program_version(), a, b, sides.formats, exact),
        differing=[pair for pair in found if pair.state == "differing"],
        only_a=[pair for pair in found if pair.state == "only_a" and pair.name not in tied],
        only_b=[pair for pair in found if pair.state == "only_b" and pair.name not in tied],
        notes=[*sides.notes, note],
        files=sides.files,
        # Whether a tied output layer that one side lacks repeats the embedding, its values would tell.
        unread=[pair for pair in found if pair.state == "unread" or (pair.state != "differing" and pair.name in tied)],
    )


def _tied(sides: Sides) -> list[tuple[str, str]]:
    """The output layer and the embedding that it repeats, by the config of either side that is known and ties them."""
    configs = [config for side in (sides.a, sides.b) if supported(config := config_or_empty(side))]
    return list(filter(None, map(tied_head, configs)))


def _redundant(sides: Sides, pairs: Mapping[str, Pair]) -> set[str]:
    """Names that one side lacks and that follow from the rest: an output layer that repeats the embedding, and so on.

    An output layer is one only where the side that stores it has the embedding's own bits in it.
    """
    alone = {name for name, pair in pairs.items() if pair.state in ("only_a", "only_b")}
    found: set[str] = set()
    for tied in _tied(sides):
        if tied[0] in alone and tied[1] in pairs:
            head, embedding = (pairs[name] for name in tied)
            is_same = head.content_b == embedding.content_b
            if head.a is not None:
                is_same = head.content_a == embedding.content_a
            found |= {head.name} if is_same else set()
    return found


def _rounded(checkpoint: Checkpoint, cast: Sequence[Pair]) -> Iterator[str]:
    """Yields a note for state that must stay float32 and was cast to something narrower."""
    config = config_or_empty(checkpoint)
    state = fp32_names(config if supported(config) else None)
    if names := [pair.name for pair in cast if pair.name in state]:
        yield (
            f"{summarize(names)}: state that must stay float32 is narrower on one side, which changes routing; "
            "`ckptkit verify --source` judges it (CK203)"
        )


def pairs_of(a: Checkpoint, b: Checkpoint) -> Iterator[Pair]:
    """Yields a pair for each name of either side, those of `a` first. Both are read once, a few groups at a time.

    Raises CkptkitError as reading does.
    """
    groups = list(common_groups(a, b))
    groups += [left for group in b.groups if (left := tuple(name for name in group if name not in a.specs))]
    sides, total = BothSides(a, b), sum(spec.nbytes for side in (a, b) for spec in side.specs.values())
    with progress("comparing", total) as advance, threads(sides.largest(groups), SPARE) as pool:
        for pairs in pool.map(partial(_look, sides), groups):
            advance(sum(pair.nbytes for pair in pairs))
            yield from pairs


def _look(sides: BothSides, names: Sequence[str]) -> list[Pair]:
    """The pairs of names that are read together."""
    a, b = sides.a.specs, sides.b.specs if sides.b is not None else {}
    return [_pair(both, a.get(both.name), b.get(both.name)) for both in sides.read(names)]


def _pair(both: Both, spec_a: TensorSpec | None, spec_b: TensorSpec | None) -> Pair:
    name, a, b, is_constant = both.name, both.a, both.b, both.stats.constant
    if a is None or b is None:  # one side has it, or both have the same
        spec = spec_a or spec_b
        content = None if spec is None else (spec.shape, both.stats.digest)
        in_a, in_b = (None if one is None else content for one in (spec_a, spec_b))
        state: State = "equal" if both.is_equal else "only_a" if spec_b is None else "only_b"
        return Pair(name, spec_a, spec_b, in_a, in_b, state, is_constant and not both.is_equal)
    narrow_a, narrow_b = _narrowed(a, b)
    content_a, content_b = content_of(narrow_a), content_of(narrow_b)
    if content_a == content_b and narrow_a.dtype == narrow_b.dtype:
        return Pair(name, spec_a, spec_b, content_a, content_b, "cast")
    far = compare_tensors(name, a, b, common_dtype(a, b)) if a.shape == b.shape else None
    return Pair(name, spec_a, spec_b, content_a, content_b, "differing", is_constant, far)


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


def moved_names(pairs: Sequence[Pair]) -> dict[str, str]:
    """For each tensor of A that was moved the name in B that has its bits.

    A tensor that differs from its namesake may have the bits of any other name of B. One whose name B lacks counts as
    renamed where its bits stand under a name that A lacks. Constant tensors never count.
    """
    homes = by_key((pair.content_b, pair) for pair in pairs if pair.content_b is not None)
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


def moves_of(pairs: Sequence[Pair], whose: Mapping[str, str]) -> Iterator[Moved]:
    """Yields what `moved_names` found, what one mistake explains together; then tensors renamed in B."""
    differing = [pair.name for pair in pairs if pair.state == "differing"]
    stages = Stages.of_names([pair.name for pair in pairs])
    for move in explain_moves({name: whose.get(name) for name in differing}, stages, " in B"):
        yield replace(move, others=[whose[name] for name in move.names])
    placed = set(differing)
    for names in group_pairs({name: other for name, other in whose.items() if name not in placed}):
        others = [whose[name] for name in names]
        yield Moved(f"another name in B: {summarize(others)}", "", names, others=others)
