"""Compares checksums of engines with those of the sent tensors, and learns how engines keep parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckptkit.core.specs import summarize
from ckptkit.quant.formats.part_names import unpacked_name
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.weight_sync import predicted
from ckptkit.verify.weight_sync.engines import EngineState, Seat, Setup, rank_label
from ckptkit.verify.weight_sync.predicted import Order, ParamCut, Sent

Layout = tuple[tuple[str, str], ...]
Checksums = Mapping[str, str]
Sources = Mapping[Order, tuple[str, str]]
Cuts = Mapping[tuple[Layout, Seat, str], ParamCut]
_SCALES = ("scale_inv", "scale")
_EMBEDDINGS, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_HEAD = (
    "nothing was sent for this tied output layer, and it does not hold the sent embeddings: send it under both names"
)
_PACKED = "sent in INT4, but engines keep it unpacked and unchanged: add it to `ignore` in the served config.json"
_MOVED = "the parameters changed, although the same values were sent as at the last check"
_STALE = "the parameters did not change, although other values were sent than at the last check"


@dataclass(frozen=True)
class SyncHistory:
    """The results of earlier checks."""

    # How a rank of a layout keeps a parameter, by kind; by parameter if a server itself may quantize some layers.
    cuts: Cuts = field(default_factory=dict)
    sources: Mapping[str, Sources] = field(default_factory=dict)  # of the last check
    held: Mapping[tuple[str, Seat], Checksums] = field(default_factory=dict)  # of each rank in the last check

    def cuts_of(self, setups: Mapping[str, Setup]) -> dict[str, set[ParamCut]]:
        """The possible cuts of each kind (`Sent.kind`) in these engines; a missing kind may have any."""
        by_kind = defaultdict[str, dict[tuple[Layout, Seat], ParamCut]](dict)
        for (layout, seat, kind), cut in self.cuts.items():
            by_kind[kind][layout, seat] = cut
        seats = {(layout, seat) for layout, seat, _ in self.cuts}
        if {setup.layout for setup in setups.values()} - {layout for layout, _ in seats}:
            return {}  # an engine that was never checked
        return {kind: set(cuts.values()) for kind, cuts in by_kind.items() if seats <= cuts.keys()}


@dataclass(frozen=True)
class SyncResult:
    """The outcome of one check, over all ranks of all engines."""

    version: str
    engines: int
    by_value: int  # parameters with the checksum of the sent tensors
    by_change: int  # other parameters that changed exactly if one of their tensors did since the last check
    unseen: Sequence[str]  # sent, but not compared by value: in the engine's own layout, or larger than `room`
    absent: Sequence[str]  # tensors without a parameter on any rank
    not_sent: Sequence[str]  # parameters of engines without a sent tensor
    seconds: float = 0.0  # of this check, including `record`


@dataclass(frozen=True)
class SyncVerdict:
    """The errors of one check, a line each, and its results."""

    wrong: Sequence[str]
    compared: bool  # whether any parameter could be compared by value
    result: SyncResult
    history: SyncHistory


@dataclass(frozen=True, eq=False)
class _Rank:
    url: str
    seat: Seat
    setup: Setup
    checksums: Checksums  # by canonical name

    def key(self, sent: Sent, param: str) -> tuple[Layout, Seat, str]:
        return self.setup.layout, self.seat, param if self.setup.quantizes else sent.kind(param)

    @property
    def label(self) -> str:
        return rank_label(self.url, self.seat)


def _ranks(states: Mapping[str, EngineState], setups: Mapping[str, Setup]) -> list[_Rank]:
    return [
        _Rank(url, seat, setups[url], {predicted.canonical(name): checksum for name, checksum in checksums.items()})
        for url, state in states.items()
        for seat, checksums in state.ranks.items()
    ]


def judge(
    version: str,
    sent: Sent,
    states: Mapping[str, EngineState],
    setups: Mapping[str, Setup],
    history: SyncHistory,
    *,
    is_complete: bool = True,
) -> SyncVerdict:
    """Compares every rank with the sent tensors (if `is_complete` all of them), its last check and other engines."""
    ranks = _ranks(states, setups)
    is_equal, cuts = _by_value(sent, ranks, history.cuts)
    wrong = defaultdict[tuple[str, str], list[str]](list)  # parameters, by rank and reason
    was, now = _Record.of(history.sources), _Record.of(sent.sources)
    unseen, not_sent = set[str](), set[str]()
    by_change = 0
    for rank in ranks:
        params = list(_params(sent.sources, rank.checksums))
        for param in rank.checksums.keys() - params if is_complete else ():
            if param.endswith(predicted.UNUSED):
                continue
            not_sent.add(param)
            # An output layer without a sent tensor is tied to the embeddings.
            tied = _expected(sent, _EMBEDDINGS, rank) if param == _OUTPUT and _EMBEDDINGS in sent.sources else {}
            if tied and rank.checksums[param] not in tied.values():
                wrong[rank.label, _HEAD].append(param)
        before = history.held.get((rank.url, rank.seat), {})
        for param in params:
            if is_equal.get((rank, param)):
                continue
            if is_complete and (lost_parts := predicted.missing_parts(param, sent.sources.get(param, {}))):
                wrong[rank.label, f"{', '.join(lost_parts)} was not sent"].append(param)
                continue
            if (rank, param) in is_equal and rank.key(sent, param) in cuts:
                wrong[rank.label, _reason(sent, rank, param, before)].append(param)
                continue
            unseen.add(param)
            reason = _judge_change(was.parts(param), now.parts(param), before.get(param), rank.checksums[param])
            # The engine's dtype may round away a change of float32, and a shared expert may be in the parameter or not.
            is_unknown = reason == _STALE and sent.wide(param)
            is_unknown |= reason == _MOVED and was.shared(param) != now.shared(param)
            if reason is None or is_unknown:
                continue
            by_change += 1
            if reason:
                wrong[rank.label, reason].append(param)
    lost = was.own.keys() - now.own.keys()
    lines = [f"an earlier update sent {summarize(lost)}, but this one does not"] if lost else []
    lines += [f"{label}: {summarize(params)}: {reason}" for (label, reason), params in wrong.items()]
    absent = _absent(sent, ranks, any(cut.shared for cut in cuts.values()))
    packed = {part.param for name in absent for part in predicted.target_parts(unpacked_name(name))} & not_sent
    lines += [f"{summarize(sorted(packed))}: {_PACKED}"] if packed else []
    names = (sorted(unseen), sorted(absent), sorted(not_sent))
    return SyncVerdict(
        [*lines, *_compare_engines(sent, ranks, set(chain(*wrong.values())))],
        bool(is_equal),
        SyncResult(version, len(states), sum(is_equal.values()), by_change, *names),
        SyncHistory(cuts, dict(sent.sources), {(rank.url, rank.seat): rank.checksums for rank in ranks}),
    )


def changed_since(
    states: Mapping[str, EngineState], setups: Mapping[str, Setup], history: SyncHistory
) -> tuple[int, list[str]]:
    """The number of parameters in the last check, and a line for those of each rank that changed since."""
    count, lines = 0, []
    for rank in _ranks(states, setups):
        before = history.held.get((rank.url, rank.seat), {})
        count += len(before)
        if changed := [name for name in before if before[name] != rank.checksums.get(name)]:
            lines.append(f"{rank.label}: {summarize(changed)}: changed since the last check")
    return count, lines


def _by_value(sent: Sent, ranks: Sequence[_Rank], known: Cuts) -> tuple[dict[tuple[_Rank, str], bool], Cuts]:
    """Whether parameters of each rank equal the sent tensors, if known, and how parameters are cut."""
    is_equal, cuts = dict[tuple[_Rank, str], bool](), dict(known)
    for rank in ranks:
        for param in _params(sent.sources, rank.checksums):
            if not (expected := _expected(sent, param, rank)):
                continue
            cut = next((cut for cut, checksum in expected.items() if checksum == rank.checksums[param]), None)
            is_equal[rank, param] = cut is not None
            if cut is not None and param not in sent.constant:
                cuts.setdefault(rank.key(sent, param), cut)
    return is_equal, cuts


def _expected(sent: Sent, param: str, rank: _Rank) -> dict[ParamCut, str]:
    """The possible checksums of a rank by cut, or empty if unknown."""
    if rank.setup.dequantizes and any(f"{param}_{scale}" in sent.sources for scale in _SCALES):
        return {}  # the checksum is that of dequantized weights
    if param in sent.sources:
        items = sent.predicted.get(param, {}).items()
        return {cut: checksum for (cut, at), checksum in items if cut.at(rank.seat[0]) == at}
    return {ParamCut(): sent.checksums[param]}


def _params(sources: Mapping[str, Sources], held: Collection[str]) -> Iterator[str]:
    """The parameters of a rank for these tensors: fused ones, else those with the tensors' names."""
    for param, parts in sources.items():
        if param in held:
            yield param
        else:
            yield from (name for name, _ in parts.values() if name in held)


def _reason(sent: Sent, rank: _Rank, param: str, before: Checksums) -> str:
    checksum = rank.checksums[param]
    if before.get(param) == checksum:
        return "the parameters have the values of the last check, not the sent ones"
    matches = (name for name, found in sent.predicted.items() if name != param and checksum in found.values())
    return f"the values are those of {match}" if (match := next(matches, None)) else "the values are not the sent ones"


def _judge_change(was: Mapping[str, str], sent: Mapping[str, str], before: str | None, now: str) -> str | None:
    """The error if a parameter changed and its tensors did not, or vice versa; empty if correct, None if unknown."""
    if before is None or was.keys() != sent.keys():
        return None
    if was == sent:
        return "" if before == now else _MOVED
    return "" if before != now else _STALE


@dataclass(frozen=True)
class _Record:
    """Checksums of the tensors of an update by parameter (`sources`) and by name (`own`)."""

    sources: Mapping[str, Sources]
    own: Mapping[str, str]

    @classmethod
    def of(cls, sources: Mapping[str, Sources]) -> _Record:
        return cls(sources, dict(pair for parts in sources.values() for pair in parts.values()))

    def parts(self, param: str) -> dict[str, str]:
        """Names and checksums of the tensors and scales of a parameter, without a shared expert."""
        keys = (param, *(f"{param}_{scale}" for scale in _SCALES))
        items = chain.from_iterable(self.sources.get(key, {}).items() for key in keys)
        parts = dict(pair for order, pair in items if order[0] != predicted.SHARED)
        return parts or {key: self.own[key] for key in keys if key in self.own}

    def shared(self, param: str) -> list[tuple[str, str]]:
        """Names and checksums of a shared expert that may be in a parameter."""
        return sorted(pair for order, pair in self.sources.get(param, {}).items() if order[0] == predicted.SHARED)


def _absent(sent: Sent, ranks: Sequence[_Rank], fused: bool) -> set[str]:
    """Tensors without a parameter in some engine. `fused`: shared experts are kept as routed ones."""
    absent = set[str]()
    for url in {rank.url for rank in ranks}:
        held = {param for rank in ranks if rank.url == url for param in rank.checksums}
        unused = (parts.values() for param, parts in sent.sources.items() if param not in held)
        absent |= {name for name, _ in chain.from_iterable(unused)} - held
    scales = tuple(f".weight_{scale}" for scale in _SCALES)  # part of the checksum of their weight
    is_shared = predicted.SHARED_EXPERT.fullmatch
    return {name for name in absent if not name.endswith(scales) and not (fused and is_shared(name))}


def _compare_engines(sent: Sent, ranks: Sequence[_Rank], reported: Collection[str]) -> Iterator[str]:
    """Describes engines with other weights than engines of the same layout, without `reported` parameters."""
    found = defaultdict[str, list[str]](list)
    for group in by_key(((rank.setup.layout, rank.seat), rank) for rank in ranks).values():
        for param in _params(sent.sources, group[0].checksums):
            values = Counter(rank.checksums.get(param) for rank in group)
            if len(values) == 1 or param in reported:
                continue
            (value, most), (_, next_most), *_ = values.most_common()
            odd = [rank.label for rank in group if most == next_most or rank.checksums.get(param) != value]
            found["; ".join(odd)].append(param)
    for labels, params in found.items():
        yield f"{labels}: {summarize(params)}: engines of the same layout differ"
