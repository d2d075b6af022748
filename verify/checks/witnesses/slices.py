"""CK402 in words: which ranks hold something else than their slice of the source, and what it is."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckptkit.core.specs import ranges
from verify.evidence.folding import LAYER, group_by_pattern
from verify.evidence.moved import AGAIN, Moved, Stages, explain_moves
from verify.issue import Issue
from verify.witnesses.megatron.job import TensorSeen
from verify.witnesses.megatron.run import MegatronRun

_EXPERT = re.compile(r"(.+\.experts\.experts)\.(\d+)\.(.+)")
_LOCAL = "each expert parallel rank numbered its experts from 0: save or convert again with global expert IDs"
Seen = tuple[int, TensorSeen]


def ranks_named(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0..1`."""
    distinct = set(ranks)
    return f"rank{'s' * (len(distinct) > 1)} {ranges(distinct).strip('{}')}"


def wrong_slices(run: MegatronRun, where: Path, stages: Stages) -> Iterator[Issue]:
    """Every parameter that is not its slice of `where`: whole layers and experts first, then single tensors."""
    by_verdict: dict[str, list[Seen]] = defaultdict(list)
    for report in run.reports:
        for tensor in report.tensors:
            by_verdict[tensor.verdict].append((report.rank, tensor))
    for verdict in ("unknown", "unwritten"):
        yield from _plainly(verdict, by_verdict[verdict], where)
    differing = by_verdict["differs"]
    whose = _whose(differing)
    for move in explain_moves(whose, stages):
        text, hint = _experts(move, whose, run)
        expected = "each layer's own values" if move.is_layers else f"the slice of {where}"
        yield _together(expected, text, hint, move.names, differing)
    yield from _differing([pair for pair in differing if whose.get(pair[1].name, "") is None], where)


def _plainly(verdict: str, seen: Sequence[Seen], where: Path) -> Iterator[Issue]:
    for names in group_by_pattern(_by_name(seen)):
        if verdict == "unknown":
            expected, actual = f"a tensor of {where} to compare with", "there is none"
            hint = "config.json and the weights do not describe the same model"
        else:
            expected, actual = "written by the load", "still as it was before the load"
            hint = "Megatron would train on random values: convert again"
        yield Issue(expected, actual, hint, names=names, rank=_ranks_of(names, seen))


def _differing(seen: Sequence[Seen], where: Path) -> Iterator[Issue]:
    """Tensors that hold no other tensor's values: those together that share a diagnosis."""
    by_words: dict[str, list[Seen]] = defaultdict(list)
    for rank, tensor in seen:
        by_words[tensor.diagnosis].append((rank, tensor))
    for diagnosis, pairs in by_words.items():
        by_name = _by_name(pairs)
        for names in group_by_pattern(by_name):
            worst = max((by_name[name] for name in names), key=lambda tensor: (tensor.differing, tensor.name))
            count = (
                f"{worst.differing} of {worst.elements} elements differ in {worst.name}, by up to {worst.largest:.3g}"
            )
            actual = f"{diagnosis} ({count})" if diagnosis else count
            yield Issue(f"the slice of {where}", actual, AGAIN, names=names, rank=_ranks_of(names, pairs))


def _together(expected: str, actual: str, hint: str, names: Sequence[str], seen: Sequence[Seen]) -> Issue:
    return Issue(expected, actual, hint, names=names, rank=_ranks_of(names, seen), together=True)


def _by_name(seen: Iterable[Seen]) -> dict[str, TensorSeen]:
    """The worst of each tensor over all ranks."""
    found: dict[str, TensorSeen] = {}
    for _, tensor in seen:
        if tensor.name not in found or tensor.differing > found[tensor.name].differing:
            found[tensor.name] = tensor
    return found


def _ranks_of(names: Iterable[str], seen: Iterable[Seen]) -> str:
    wanted = set(names)
    return ranks_named(rank for rank, tensor in seen if tensor.name in wanted)


def _whose(seen: Sequence[Seen]) -> dict[str, str | None]:
    """Whose values each wrong tensor holds, on every rank that has a wrong slice of it; None where none or several do.

    Tensors that could be of several layers are those of the layer that the other tensors of theirs are of.
    """
    origins: dict[str, set[str]] = {}
    for _, tensor in seen:
        origins[tensor.name] = origins.get(tensor.name, set(tensor.origins)) & set(tensor.origins)
    layers: dict[int, set[int]] = {}
    for name, found in origins.items():
        if (match := LAYER.match(name)) and found:
            here = {int(other[1]) for one in found if (other := LAYER.match(one))}
            layers[int(match[1])] = layers.get(int(match[1]), here) & here
    return {name: _one_of(name, found, layers) for name, found in origins.items()}


def _one_of(name: str, found: set[str], layers: Mapping[int, set[int]]) -> str | None:
    if len(found) > 1 and (match := LAYER.match(name)):
        fits = layers[int(match[1])]
        found = {one for one in found if (other := LAYER.match(one)) and int(other[1]) in fits}
    return next(iter(found)) if len(found) == 1 else None


def _experts(move: Moved, whose: Mapping[str, str | None], run: MegatronRun) -> tuple[str, str]:
    """The text and hint of tensors that moved, with the expert parallel rank if these are all of its experts."""
    pairs = {
        (int(here[2]), int(there[2]))
        for name in move.names
        if (here := _EXPERT.fullmatch(name)) and (there := _EXPERT.fullmatch(whose[name] or ""))
    }
    for rank, experts in _held(run).items():
        first = min(experts)
        local = {(expert, expert - first) for expert in experts}
        if first and pairs and (pairs == local or pairs == {(other, expert) for expert, other in local}):
            which = f"{ranges(experts)} are those of expert parallel rank {rank}"
            return f"{move.text}: {which}, {ranges(range(len(experts)))} its local IDs", _LOCAL
    return move.text, move.hint


def _held(run: MegatronRun) -> dict[int, set[int]]:
    """The experts of each expert parallel rank."""
    found: dict[int, set[int]] = defaultdict(set)
    for report in run.reports:
        found[report.ep] |= {int(match[2]) for tensor in report.tensors if (match := _EXPERT.fullmatch(tensor.name))}
    return {rank: experts for rank, experts in found.items() if experts}
