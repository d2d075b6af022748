"""The job of an engine that loads a checkpoint, and the report on it. Needs no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.witnesses.loading.region import Region, covered

NUMBER = re.compile(r"[-+]?\d[\d.e+-]*")


@dataclass(frozen=True)
class EngineSizes:
    tp: int = 1  # ranks that share a layer
    ep: int = 1  # divides `tp`: each rank keeps 1/ep of the experts, and tp/ep ranks cut those among them
    dp_attention: bool = False  # every rank holds all heads (`--enable-dp-attention`, `--dp-size` of `tp`)
    pp: int = 1  # pipeline stages

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        stages = [f"pp {self.pp}"] if self.pp > 1 else []
        return ", ".join([f"tp {self.tp}", *stages, f"ep {self.ep}", *["dp attention"] * self.dp_attention])


ONE_RANK = EngineSizes()


@dataclass(frozen=True)
class LoadJob:
    adapter: str  # the module that is its `Engine`
    checkpoint: Path
    hf: Path | None = None  # gives the config of a Megatron checkpoint that carries none
    source: Path | None = None  # an unquantized HF directory with the values expected of a Megatron checkpoint
    report: str = ""
    sizes: EngineSizes = ONE_RANK
    rank: int = 0

    @property
    def scratch(self) -> Path:
        """The directory that all ranks share, with only their jobs and reports."""
        return Path(self.report).parent


@dataclass(frozen=True)
class Observation:
    """A fault of an HF tensor, or of a parameter of the engine that belongs to no tensor."""

    tensor: str
    param: str  # the engine's name
    what: str
    rank: str | None = None  # the ranks that it concerns, or None for all
    is_absent: bool = False  # the engine has no such parameter, as a rank lacks those of other layers
    is_dropped: bool = False  # the engine was given the tensor and wrote no element of it
    is_partial: bool = False  # the engine wrote some elements of the tensor, and not all
    change: float | None = None  # the largest of a parameter in other scales, relative to a block's largest value
    original: str | None = None  # the target's tensor that a draft model uses instead of this copy


@dataclass
class LoadReport:
    """Results of one rank or, after `merged`, of all ranks. Filled in step by step."""

    version: str
    model: str  # the engine's class
    device: str
    dtype: str
    sizes: EngineSizes = ONE_RANK
    parameters: int = 0  # of the first rank
    loaded_names: int = 0  # the number of names given to `load_weights`
    equal: dict[str, int] = field(default_factory=dict)  # sizes in bytes of tensors with equal bits
    # Tensors of which the rank holds a part: their number of elements, and that part.
    partial: Mapping[str, tuple[int, Sequence[Region]]] = field(default_factory=dict)
    routers_seen: int = 0
    unwritten: tuple[Observation, ...] = ()  # elements that still hold the poison
    dropped: tuple[Observation, ...] = ()  # tensors that were not written, or only in part
    differing: tuple[Observation, ...] = ()  # places with other bits than the checkpoint
    rounded: tuple[Observation, ...] = ()  # places of a smaller dtype, which lost bits
    computed: tuple[str, ...] = ()  # parameters that were computed instead of copied, and so not compared
    routers: tuple[Observation, ...] = ()  # those that cannot choose
    draft: tuple[str, ...] = ()  # names of multi-token prediction layers
    draft_model: LoadReport | None = None  # results of the draft model, into which these layers are loaded
    log: tuple[str, ...] = ()  # the engine's warnings about unknown names
    repacked: tuple[Observation, ...] | None = None  # faults after repacking, or None if it did not run
    repacked_seen: int = 0
    unchecked: tuple[str, ...] = ()  # parameters repacked into a layout that ckptkit does not know
    # The largest `change` of each parameter that repacking rounded to other scales.
    requantized: dict[str, float] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        return len(self.equal.keys() | {seen.tensor for seen in self.differing})

    @property
    def bytes(self) -> int:
        return sum(self.equal.values())

    @staticmethod
    def merged(reports: Sequence[LoadReport]) -> LoadReport:
        """One report of all ranks, in their order. A tensor is complete if the ranks together hold all of it."""
        first = reports[0]
        if len(reports) == 1:
            return first
        differing = _shared([report.differing for report in reports])
        wrong = {seen.tensor for seen in differing}
        routers = _shared([report.routers for report in reports])
        repacked = [report.repacked for report in reports if report.repacked is not None]
        drafts = [report.draft_model for report in reports if report.draft_model is not None]
        changes = by_key(item for report in reports for item in report.requantized.items())
        return replace(
            first,
            equal={name: size for report in reports for name, size in report.equal.items() if name not in wrong},
            partial={},
            unwritten=_shared([report.unwritten for report in reports]),
            dropped=tuple(_dropped(reports)),
            differing=differing,
            rounded=_shared([report.rounded for report in reports]),
            computed=_distinct(report.computed for report in reports),
            routers=tuple(one for one in routers if one.rank is None or not one.is_absent),
            log=_distinct(report.log for report in reports),
            repacked=_shared(repacked) if len(repacked) == len(reports) else None,
            repacked_seen=sum(report.repacked_seen for report in reports),
            unchecked=_distinct(report.unchecked for report in reports),
            requantized={name: max(parts) for name, parts in changes.items()},
            draft_model=LoadReport.merged(drafts) if len(drafts) == len(reports) else None,
        )


def _distinct(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(lists)))


def _shared(ranks: Sequence[Sequence[Observation]]) -> tuple[Observation, ...]:
    """Merges observations that differ only in numbers: keeps the first rank's, with its ranks unless it is on all."""
    by_wording: dict[tuple[str, str, str], dict[int, Observation]] = defaultdict(dict)
    for rank, observations in enumerate(ranks):
        for seen in observations:
            by_wording[seen.tensor, seen.param, NUMBER.sub("#", seen.what)][rank] = seen
    return tuple(
        replace(next(iter(by_rank.values())), rank=None if len(by_rank) == len(ranks) else ", ".join(map(str, by_rank)))
        for by_rank in by_wording.values()
    )


def _dropped(reports: Sequence[LoadReport]) -> Iterator[Observation]:
    """Tensors that no rank holds completely, nor all ranks together."""
    dropped = [{seen.tensor: seen for seen in report.dropped} for report in reports]
    for name in dropped[0]:
        if not all(name in rank for rank in dropped):
            continue
        seen = [rank[name] for rank in dropped]
        partial = [report.partial[name] for report in reports if name in report.partial]
        if not partial:
            yield next((one for one in seen if not one.is_dropped), seen[0])
            continue
        elements = partial[0][0]
        if (count := covered(elements, [region for _, regions in partial for region in regions])) < elements:
            what = f"only {count} of its {elements} elements were written"
            yield replace(seen[0], what=what, is_dropped=False, is_partial=True)
