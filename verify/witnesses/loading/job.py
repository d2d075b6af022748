"""What an engine is asked to load, and what was seen of it. Needs no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptkit.verify.witnesses.loading.region import Region, covered

DROPPED = "it was given to load_weights and written nowhere"
NUMBER = re.compile(r"[-+]?\d[\d.e+-]*")


@dataclass(frozen=True)
class EngineSizes:
    """How an engine is cut."""

    tp: int = 1  # ranks that share a layer
    ep: int = 1  # divides `tp`: each rank keeps 1/ep of the experts, and tp/ep ranks cut those among them
    dp_attention: bool = False  # every rank keeps the attention whole (`--enable-dp-attention`, `--dp-size` of `tp`)
    pp: int = 1  # pipeline stages

    @property
    def ranks(self) -> int:
        """How many processes that are."""
        return self.tp * self.pp

    def __str__(self) -> str:
        stages = [f"pp {self.pp}"] if self.pp > 1 else []
        return ", ".join([f"tp {self.tp}", *stages, f"ep {self.ep}", *["dp attention"] * self.dp_attention])


ONE_RANK = EngineSizes()


@dataclass(frozen=True)
class LoadJob:
    """One rank's task: load a checkpoint into an engine, and compare."""

    adapter: str  # the module that is its `Engine`
    checkpoint: Path
    hf: Path | None = None  # gives the config of a Megatron checkpoint that carries none
    source: Path | None = None  # an unquantized HF directory: what a Megatron checkpoint's values are compared with
    report: str = ""
    sizes: EngineSizes = ONE_RANK
    rank: int = 0

    @property
    def scratch(self) -> Path:
        """The folder that all ranks share, empty but for their jobs and reports."""
        return Path(self.report).parent


@dataclass(frozen=True)
class Observation:
    """What is wrong with an HF tensor, or with a parameter of the engine that belongs to none."""

    tensor: str
    param: str  # the engine's name
    what: str
    rank: str | None = None  # where, of several ranks; None: on all
    is_absent: bool = False  # whether the engine has no such parameter, as a rank lacks those of other layers
    original: str | None = None  # the tensor that a draft model takes from its target instead of this copy


@dataclass
class LoadReport:
    """What was seen on one rank or, after `merged`, on all of them. A witness fills it in while it looks."""

    version: str
    model: str  # the engine's class
    device: str
    dtype: str
    sizes: EngineSizes = ONE_RANK
    parameters: int = 0  # of the first rank
    loaded_names: int = 0  # how many names `load_weights` was given
    equal: dict[str, int] = field(default_factory=dict)  # tensors whose bits are where they should be, their bytes
    # Tensors that are not here as a whole: how many elements they have, and which of them are here.
    partial: Mapping[str, tuple[int, Sequence[Region]]] = field(default_factory=dict)
    routers_seen: int = 0
    unwritten: tuple[Observation, ...] = ()  # what still holds the poison
    dropped: tuple[Observation, ...] = ()  # names that were given and written nowhere, or in part
    differing: tuple[Observation, ...] = ()  # places whose bits are not the file's
    rounded: tuple[Observation, ...] = ()  # places of a smaller dtype, which lost bits
    computed: tuple[str, ...] = ()  # parameters that were computed instead of copied, and so not compared
    routers: tuple[Observation, ...] = ()  # dead ones
    draft: tuple[str, ...] = ()  # names of multi-token prediction layers
    draft_model: LoadReport | None = None  # what was seen of the draft model, which these layers are loaded into
    log: tuple[str, ...] = ()  # what the engine said of unknown names
    repacked: tuple[Observation, ...] | None = None  # wrong after the quantization methods; None: they did not run
    repacked_seen: int = 0
    unchecked: tuple[str, ...] = ()  # what they turned into a layout that is not known here
    # Parameters that they rounded to other scales, and their largest change, as a part of a block's largest value.
    requantized: dict[str, float] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        """How many tensors were compared."""
        return len(self.equal.keys() | {seen.tensor for seen in self.differing})

    @property
    def bytes(self) -> int:
        """How many bytes are where they should be."""
        return sum(self.equal.values())

    @staticmethod
    def merged(reports: Sequence[LoadReport]) -> LoadReport:
        """One report of all ranks, in the order of their numbers; that of a single rank as it is.

        A tensor is whole where all of it is on some of the ranks.
        """
        first = reports[0]
        if len(reports) == 1:
            return first
        differing = _shared([report.differing for report in reports])
        wrong = {seen.tensor for seen in differing}
        routers = _shared([report.routers for report in reports])
        repacked = [report.repacked for report in reports if report.repacked is not None]
        drafts = [report.draft_model for report in reports if report.draft_model is not None]
        requantized: dict[str, float] = {}
        for name, change in (item for report in reports for item in report.requantized.items()):
            requantized[name] = max(change, requantized.get(name, 0.0))
        return replace(
            first,
            equal={name: size for report in reports for name, size in report.equal.items() if name not in wrong},
            partial={},
            unwritten=_shared([report.unwritten for report in reports]),
            dropped=tuple(_dropped(reports)),
            differing=differing,
            rounded=_shared([report.rounded for report in reports]),
            computed=_once(report.computed for report in reports),
            routers=tuple(one for one in routers if one.rank is None or not one.is_absent),
            log=_once(report.log for report in reports),
            repacked=_shared(repacked) if len(repacked) == len(reports) else None,
            repacked_seen=sum(report.repacked_seen for report in reports),
            unchecked=_once(report.unchecked for report in reports),
            requantized=requantized,
            draft_model=LoadReport.merged(drafts) if len(drafts) == len(reports) else None,
        )


def _once(several: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Each of these texts once."""
    return tuple(dict.fromkeys(one for texts in several for one in texts))


def _shared(seen: Sequence[Sequence[Observation]]) -> tuple[Observation, ...]:
    """Observations that ranks share but for numbers, once: with the first one's numbers, and its ranks unless all."""
    by_words: dict[tuple[str, str, str], dict[int, Observation]] = defaultdict(dict)
    for rank, several in enumerate(seen):
        for one in several:
            by_words[one.tensor, one.param, NUMBER.sub("#", one.what)][rank] = one
    return tuple(
        replace(next(iter(by_rank.values())), rank=None if len(by_rank) == len(seen) else ", ".join(map(str, by_rank)))
        for by_rank in by_words.values()
    )


def _dropped(reports: Sequence[LoadReport]) -> Iterator[Observation]:
    """What is on no rank as a whole, and not on all of them together."""
    dropped = [{seen.tensor: seen for seen in report.dropped} for report in reports]
    for name in dropped[0]:
        if not all(name in others for others in dropped[1:]):
            continue
        seen = [others[name] for others in dropped]
        held = [report.partial[name] for report in reports if name in report.partial]
        if not held:
            yield next((one for one in seen if one.what != DROPPED), seen[0])
            continue
        elements = held[0][0]
        if (count := covered(elements, [region for _, regions in held for region in regions])) < elements:
            yield replace(seen[0], what=f"only {count} of its {elements} elements were written")
