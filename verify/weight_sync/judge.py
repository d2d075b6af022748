"""Judges the checksums of engines by what was sent, and learns from each update how engines keep parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckptkit.core.specs import summarize
from ckptkit.verify.weight_sync.engines import EngineState, Seat, Setup, rank_label
from ckptkit.verify.weight_sync.predicted import (
    SHARED,
    SHARED_EXPERT,
    UNUSED,
    Order,
    ParamCut,
    Sent,
    canonical,
    missing_parts,
)

Layout = tuple[tuple[str, str], ...]
Checksums = Mapping[str, str]
Sources = Mapping[Order, tuple[str, str]]
Cuts = Mapping[tuple[Layout, Seat, str], ParamCut]


@dataclass(frozen=True)
class SyncHistory:
    """What earlier checks showed.

    `cuts`: how a rank of a layout keeps a parameter, by kind, or by parameter where a server quantizes some layers by
    itself. `sources` and `held`: what was sent last, and what each rank of an engine then held.
    """

    cuts: Cuts = field(default_factory=dict)
    sources: Mapping[str, Sources] = field(default_factory=dict)
    held: Mapping[tuple[str, Seat], Checksums] = field(default_factory=dict)

    def cuts_of(self, setups: Mapping[str, Setup]) -> dict[str, set[ParamCut]]:
        """The cuts that a kind (`Sent.kind`) can have in these engines; of a kind that is not there it may be any."""
        by_kind = defaultdict[str, dict[tuple[Layout, Seat], ParamCut]](dict)
        for (layout, seat, kind), cut in self.cuts.items():
            by_kind[kind][layout, seat] = cut
        seats = {(layout, seat) for layout, seat, _ in self.cuts}
        if {setup.layout for setup in setups.values()} - {layout for layout, _ in seats}:
            return {}  # an engine that was never checked
        return {kind: set(cuts.values()) for kind, cuts in by_kind.items() if seats <= cuts.keys()}


@dataclass(frozen=True)
class SyncResult:
    """What one check looked at, over all ranks of all engines.

    `by_value`: parameters whose checksum is that of the tensors sent. `by_change`: of the others, those that changed
    exactly if a tensor of theirs did since the last check. `unseen`: names of parameters sent but not compared by
    value, since the engine keeps them in a layout of its own, or there was no room to put them together. `absent`:
    tensors that no rank has a parameter for. `not_sent`: parameters of engines that nothing was sent for. `seconds`:
    what this check took, its records included.
    """

    version: str
    engines: int
    by_value: int
    by_change: int
    unseen: Sequence[str]
    absent: Sequence[str]
    not_sent: Sequence[str]
    seconds: float = 0.0


@dataclass(frozen=True)
class SyncVerdict:
    """`wrong`: a line each. `compared`: whether anything could be compared by value. `known`: what it has shown."""

    wrong: Sequence[str]
    compared: bool
    result: SyncResult
    known: SyncHistory


@dataclass(frozen=True, eq=False)
class _Rank:
    """One rank's checksums, by canonical names."""

    url: str
    seat: Seat
    setup: Setup
    checksums: Checksums

    def key(self, sent: Sent, param: str) -> tuple[Layout, Seat, str]:
        return self.setup.layout, self.seat, param if self.setup.quantizes else sent.kind(param)

    @property
    def label(self) -> str:
        return rank_label(self.url, self.seat)


def _ranks(states: Mapping[str, EngineState], setups: Mapping[str, Setup]) -> list[_Rank]:
    return [
        _Rank(url, seat, setups[url], {canonical(name): checksum for name, checksum in checksums.items()})
        for url, state in states.items()
        for seat, checksums in state.ranks.items()
    ]


def judge(
    version: str,
    sent: Sent,
    states: Mapping[str, EngineState],
    setups: Mapping[str, Setup],
    known: SyncHistory,
    *,
    whole: bool = True,
) -> SyncVerdict:
    """Compares every rank of every engine with what was sent, with what it held before, and with the other engines.

    `version`: the update's name in the result. `whole`: everything that was sent is known, not chosen tensors alone.
    """
    ranks = _ranks(states, setups)
    is_equal, cuts = _by_value(sent, ranks, known.cuts)
    wrong = defaultdict[tuple[str, str], list[str]](list)  # parameters, by rank and reason
    was, now = _Record.of(known.sources), _Record.of(sent.sources)
    unseen, not_sent = set[str](), set[str]()
    by_change = 0
    for rank in ranks:
        params = list(_params(sent.sources, rank.checksums))
        for param in rank.checksums.keys() - params if whole else ():
            if param.endswith(f".{UNUSED}"):
                continue
            not_sent.add(param)
            # An output layer that nothing was sent for holds the embeddings that were sent.
            tied = _expected(sent, _EMBEDDINGS, rank) if param == _OUTPUT and _EMBEDDINGS in sent.sources else {}
            if tied and rank.checksums[param] not in tied.values():
                wrong[rank.label, _HEAD].append(param)
        before = known.held.get((rank.url, rank.seat), {})
        for param in params:
            if is_equal.get((rank, param)):
                continue
            if whole and (lost_parts := missing_parts(param, sent.sources.get(param, {}))):
                wrong[rank.label, f"{', '.join(lost_parts)} of it was not sent"].append(param)
                continue
            if (rank, param) in is_equal and rank.key(sent, param) in cuts:
                wrong[rank.label, _reason(sent, rank, param, before)].append(param)
                continue
            unseen.add(param)
            reason = _changed(was.parts(param), now.parts(param), before.get(param), rank.checksums[param])
            # A change of float32 may be lost in the engine's dtype, and a shared expert may be in it or not.
            untold = reason == _STALE and sent.wide(param)
            untold |= reason == _MOVED and was.shared(param) != now.shared(param)
            if reason is None or untold:
                continue
            by_change += 1
            if reason:
                wrong[rank.label, reason].append(param)
    lost = was.own.keys() - now.own.keys()
    lines = [f"sent in an earlier update and not in this one: {summarize(lost)}"] if lost else []
    lines += [f"{label}: {summarize(params)}: {reason}" for (label, reason), params in wrong.items()]
    absent = _absent(sent, ranks, any(cut.shared for cut in cuts.values()))
    return SyncVerdict(
        [*lines, *_apart(sent, ranks, set(chain(*wrong.values())))],
        bool(is_equal),
        SyncResult(
            version,
            len(states),
            sum(is_equal.values()),
            by_change,
            sorted(unseen),
            sorted(absent),
            sorted(not_sent),
        ),
        SyncHistory(cuts, dict(sent.sources), {(rank.url, rank.seat): rank.checksums for rank in ranks}),
    )


def changed_since(
    states: Mapping[str, EngineState], setups: Mapping[str, Setup], known: SyncHistory
) -> tuple[int, list[str]]:
    """How many parameters are known from the last check, and a line for those of each rank that hold something else."""
    count, lines = 0, []
    for rank in _ranks(states, setups):
        before = known.held.get((rank.url, rank.seat), {})
        count += len(before)
        if changed := [name for name in before if before[name] != rank.checksums.get(name)]:
            lines.append(f"{rank.label}: {summarize(changed)}: not as at the last check")
    return count, lines


def _by_value(sent: Sent, ranks: Sequence[_Rank], known: Cuts) -> tuple[dict[tuple[_Rank, str], bool], Cuts]:
    """Whether parameters of each rank hold what was sent, where that can be told, and how parameters are cut."""
    is_equal, cuts = dict[tuple[_Rank, str], bool](), dict(known)
    for rank in ranks:
        for param in _params(sent.sources, rank.checksums):
            expected = _expected(sent, param, rank)
            if not expected:
                continue
            cut = next((cut for cut, checksum in expected.items() if checksum == rank.checksums[param]), None)
            is_equal[rank, param] = cut is not None
            if cut is not None and param not in sent.constant:
                cuts.setdefault(rank.key(sent, param), cut)
    return is_equal, cuts


def _expected(sent: Sent, param: str, rank: _Rank) -> dict[ParamCut, str]:
    """What a rank may hold, by how it is cut; nothing where that is not known."""
    if rank.setup.dequantizes and any(f"{param}_{scale}" in sent.sources for scale in _SCALES):
        return {}  # the checksum is of the weights that these stand for
    if param in sent.sources:
        found = sent.predicted.get(param, {})
        return {cut: checksum for (cut, at), checksum in found.items() if cut.at(rank.seat[0]) == at}
    return {ParamCut(): sent.checksums[param]}


_SCALES = ("scale_inv", "scale")


def _params(sources: Mapping[str, Sources], held: Collection[str]) -> Iterator[str]:
    """The parameters of a rank that tensors of these go into, where it does not fuse them those of their own names."""
    for param, parts in sources.items():
        if param in held:
            yield param
        else:
            yield from (name for name, _ in parts.values() if name in held)


_EMBEDDINGS, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_HEAD = (
    "nothing was sent for it, and it does not hold the embeddings that were sent: send a tied output layer under both "
    "names"
)


def _reason(sent: Sent, rank: _Rank, param: str, before: Checksums) -> str:
    checksum = rank.checksums[param]
    if before.get(param) == checksum:
        return "as they were at the last check, not as sent"
    others = [other for other, found in sent.predicted.items() if other != param and checksum in found.values()]
    return f"not as sent, but as {others[0]} was sent" if others else "not as sent"


_MOVED = "changed, though the same was sent as at the last check"
_STALE = "unchanged, though something else was sent than at the last check"


def _changed(was: Mapping[str, str], sent: Mapping[str, str], before: str | None, now: str) -> str | None:
    """What is wrong in whether a parameter changed; nothing where it is well, None where that cannot be told."""
    if before is None or was.keys() != sent.keys():
        return None
    if was == sent:
        return "" if before == now else _MOVED
    return "" if before != now else _STALE


@dataclass(frozen=True)
class _Record:
    """The tensors of an update by the parameters that they go into, and by their own names."""

    sources: Mapping[str, Sources]
    own: Mapping[str, str]

    @classmethod
    def of(cls, sources: Mapping[str, Sources]) -> _Record:
        return cls(sources, dict(pair for parts in sources.values() for pair in parts.values()))

    def parts(self, param: str) -> dict[str, str]:
        """The tensors that a parameter is made of, its scales among them, with their checksums.

        Not a shared expert, which may be in it or not.
        """
        keys = (param, *(f"{param}_{scale}" for scale in _SCALES))
        orders = [(key, order) for key in keys for order in self.sources.get(key, {}) if order[0] != SHARED]
        found = dict(self.sources[key][order] for key, order in orders)
        return found or {key: self.own[key] for key in keys if key in self.own}

    def shared(self, param: str) -> list[tuple[str, str]]:
        """Those of a shared expert that may be in it too."""
        return sorted(pair for order, pair in self.sources.get(param, {}).items() if order[0] == SHARED)


def _absent(sent: Sent, ranks: Sequence[_Rank], fused: bool) -> set[str]:
    """Tensors that some engine has no parameter for. `fused`: shared experts are kept as routed ones."""
    absent = set[str]()
    for url in {rank.url for rank in ranks}:
        held = {param for rank in ranks if rank.url == url for param in rank.checksums}
        rest = [parts for param, parts in sent.sources.items() if param not in held]
        absent |= {name for parts in rest for name, _ in parts.values() if name not in held}
    # Scales are part of the checksum of their weight.
    scales = tuple(f".weight_{scale}" for scale in _SCALES)
    return {name for name in absent if not name.endswith(scales) and not (fused and SHARED_EXPERT.fullmatch(name))}


def _apart(sent: Sent, ranks: Sequence[_Rank], reported: Collection[str]) -> Iterator[str]:
    """Engines that hold other weights than those with the same layout; without the parameters `reported` already."""
    peers = defaultdict[tuple[Layout, Seat], list[_Rank]](list)
    for rank in ranks:
        peers[rank.setup.layout, rank.seat].append(rank)
    found = defaultdict[str, list[str]](list)
    for group in peers.values():
        for param in _params(sent.sources, group[0].checksums):
            values = Counter(rank.checksums.get(param) for rank in group)
            if len(values) == 1 or param in reported:
                continue
            (value, most), (_, next_most), *_ = values.most_common()
            odd = [rank.label for rank in group if most == next_most or rank.checksums.get(param) != value]
            found["; ".join(odd)].append(param)
    for labels, params in found.items():
        yield f"{labels}: {summarize(params)}: not the same in all engines"
