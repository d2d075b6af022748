"""Compares two checkpoints of any formats in one pass, and keeps digests instead of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.converters.planner import tied_head
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.installation import INSTALL_CONVERT, program_version
from ckptkit.core.progress import progress
from ckptkit.core.signature import public
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.side_files import is_own
from ckptkit.storage.fingerprint import require_unchanged
from ckptkit.verify.diff.result import Content, Diff, Pair, State, badness
from ckptkit.verify.diff.sides import Sides, config_or_empty, opened, supported
from ckptkit.verify.evidence.both_sides import SPARE, BothSides, TensorPair, common_groups, threads
from ckptkit.verify.evidence.compare import common_dtype
from ckptkit.verify.evidence.compare import compare as compare_tensors
from ckptkit.verify.evidence.expected import fp32_names
from ckptkit.verify.evidence.extremes import digest_of, same_bytes
from ckptkit.verify.evidence.folding import by_key, count_differing_parts
from ckptkit.verify.evidence.moved import Moved, Stages, explain_moves, group_pairs

if TYPE_CHECKING:
    from torch import Tensor


@public()
def diff(a: str | Path, b: str | Path, *, hf: str | Path | None = None, exact: bool = False) -> Diff:
    """Compares tensors under HF names, and the files that loaders read, of two checkpoints of any formats.

    `hf`: the config of a Megatron checkpoint without one. `exact`: another dtype is a difference even if a cast makes
    tensors equal. Without torch only names, shapes and dtypes are compared. Raises CkptkitError. Memory is bounded.
    """
    sides = opened(a, b, hf)
    if find_spec("torch") is None:
        return _compare_headers(sides, str(a), str(b), exact)
    with require_unchanged([locate(a).path, locate(b).path], is_own):
        return compare_checkpoints(sides, str(a), str(b), exact=exact)


def compare_checkpoints(sides: Sides, a: str, b: str, *, exact: bool = False) -> Diff:
    """Compares two open checkpoints, as `diff`."""
    pairs = {pair.name: pair for pair in pairs_of(sides.a, sides.b)}
    if not pairs:
        raise CkptkitError(f"{a} and {b} contain no tensor", "check the paths")
    redundant = _redundant(sides, pairs)
    needed = [pair for pair in pairs.values() if pair.name not in redundant]
    origins = moved_names(needed)
    renamed = {other for name, other in origins.items() if pairs[name].state == "only_a"}
    by_state = defaultdict[State, list[Pair]](list)
    for pair in needed:
        if pair.name not in origins and pair.name not in renamed:
            by_state[pair.state].append(pair)
    return Diff(
        *(program_version(), a, b, sides.formats, exact),
        nbytes=sum(pair.nbytes for pair in pairs.values()),
        equal=[pair.name for pair in by_state["equal"]],
        cast=by_state["cast"],
        redundant=sorted(redundant),
        moves=list(moves_of(needed, origins)),
        differing=sorted(by_state["differing"], key=badness, reverse=True),
        only_a=by_state["only_a"],
        only_b=by_state["only_b"],
        notes=[*sides.notes, *_rounded(sides.a, by_state["cast"])],
        files=sides.files,
    )


def _compare_headers(sides: Sides, a: str, b: str, exact: bool) -> Diff:
    tied = {head for head, _ in _tied(sides)}
    by_state = defaultdict[State, list[Pair]](list)
    for name in {**sides.a.specs, **sides.b.specs}:
        spec_a, spec_b = sides.a.specs.get(name), sides.b.specs.get(name)
        state: State = "only_a" if spec_b is None else "only_b" if spec_a is None else "unread"
        if spec_a and spec_b and spec_a.shape != spec_b.shape:
            state = "differing"
        # Without values it is unknown whether a tied output layer that one side lacks repeats the embedding.
        group: State = "unread" if name in tied and state != "differing" else state
        by_state[group].append(Pair(name, spec_a, spec_b, None, None, state))
    return Diff(
        *(program_version(), a, b, sides.formats, exact),
        differing=by_state["differing"],
        only_a=by_state["only_a"],
        only_b=by_state["only_b"],
        notes=[*sides.notes, f"values were not read, because torch is not installed: {INSTALL_CONVERT}"],
        files=sides.files,
        unread=by_state["unread"],
    )


def _tied(sides: Sides) -> list[tuple[str, str]]:
    """The tied output layer and its embedding, by the config of either side."""
    configs = [config for side in (sides.a, sides.b) if supported(config := config_or_empty(side))]
    return list(filter(None, map(tied_head, configs)))


def _redundant(sides: Sides, pairs: Mapping[str, Pair]) -> set[str]:
    """Tied output layers that one side lacks and that have the bits of the embedding on the other side."""
    redundant: set[str] = set()
    for head, embedding in ((pairs.get(head), pairs.get(embedding)) for head, embedding in _tied(sides)):
        if head is None or embedding is None or head.state not in ("only_a", "only_b"):
            continue
        if head.content_a == embedding.content_a if head.a is not None else head.content_b == embedding.content_b:
            redundant.add(head.name)
    return redundant


def _rounded(checkpoint: Checkpoint, cast: Sequence[Pair]) -> Iterator[str]:
    """Yields a note for tensors that must stay float32 and were cast to a narrower dtype."""
    config = config_or_empty(checkpoint)
    fp32 = fp32_names(config if supported(config) else None)
    if names := [pair.name for pair in cast if pair.name in fp32]:
        fault = "this state must be float32, but is narrower on one side, which changes routing"
        yield f"{summarize(names)}: {fault}; `ckptkit verify --source` judges it (CK203)"


def pairs_of(a: Checkpoint, b: Checkpoint) -> Iterator[Pair]:
    """Yields a pair for each name of either side, those of `a` first. Reads both once. Raises CkptkitError."""
    groups = list(common_groups(a, b))
    groups += [names for group in b.groups if (names := tuple(name for name in group if name not in a.specs))]
    sides, total = BothSides(a, b), sum(spec.nbytes for side in (a, b) for spec in side.specs.values())

    def compare_group(names: Sequence[str]) -> list[Pair]:
        return [_pair(both, a.specs.get(both.name), b.specs.get(both.name)) for both in sides.read(names)]

    with progress("comparing", total) as advance, threads(sides.largest(groups), SPARE) as pool:
        for pairs in pool.map(compare_group, groups):
            advance(sum(pair.nbytes for pair in pairs))
            yield from pairs


def _pair(both: TensorPair, spec_a: TensorSpec | None, spec_b: TensorSpec | None) -> Pair:
    name, a, b, is_constant = both.name, both.a, both.b, both.stats.constant
    if a is None or b is None:  # only one side has it, or both are equal
        spec = spec_a or spec_b
        content = None if spec is None else (spec.shape, both.stats.digest)
        in_a, in_b = (None if one is None else content for one in (spec_a, spec_b))
        state: State = "equal" if both.is_equal else "only_a" if spec_b is None else "only_b"
        return Pair(name, spec_a, spec_b, in_a, in_b, state, is_constant and not both.is_equal)
    narrow_a, narrow_b = _narrowed(a, b)
    content_a, content_b = content_of(narrow_a), content_of(narrow_b)
    if content_a == content_b and narrow_a.dtype == narrow_b.dtype:
        return Pair(name, spec_a, spec_b, content_a, content_b, "cast")
    distance = compare_tensors(name, a, b, common_dtype(a, b)) if a.shape == b.shape else None
    return Pair(name, spec_a, spec_b, content_a, content_b, "differing", is_constant, distance)


def _narrowed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the narrower dtype; of float16 and bfloat16, in the one that makes a cast of the other, if any."""
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
    """The name in B with the bits of each moved tensor of A, without constant tensors."""
    by_content = by_key((pair.content_b, pair) for pair in pairs if pair.content_b is not None)
    moved: dict[str, str] = {}
    used: set[str] = set()
    for pair in pairs:
        if pair.state not in ("differing", "only_a") or pair.constant or pair.content_a is None:
            continue
        matches = [match for match in by_content.get(pair.content_a, ()) if match.name != pair.name]
        if pair.state == "only_a":
            matches = [match for match in matches if match.state == "only_b" and match.name not in used]
        if matches:
            moved[pair.name] = min(matches, key=lambda match: _match_rank(pair, match)).name
            used.add(moved[pair.name])
    return moved


def _match_rank(pair: Pair, match: Pair) -> tuple[bool, bool, int]:
    """Orders names with a tensor's bits: first one that was exchanged with it, then those of its kind."""
    is_mutual = match.content_a is not None and match.content_a == pair.content_b
    return not is_mutual, match.state == "equal", count_differing_parts(pair.name, match.name)


def moves_of(pairs: Sequence[Pair], origins: Mapping[str, str]) -> Iterator[Moved]:
    """Yields one `Moved` for each mistake behind `moved_names`, then tensors renamed in B."""
    differing = {pair.name: origins.get(pair.name) for pair in pairs if pair.state == "differing"}
    for move in explain_moves(differing, Stages.of_names([pair.name for pair in pairs]), " in B"):
        yield replace(move, others=[origins[name] for name in move.names])
    for names in group_pairs({name: other for name, other in origins.items() if name not in differing}):
        others = [origins[name] for name in names]
        yield Moved(f"B has another name for it: {summarize(others)}", "", names, others=others)
