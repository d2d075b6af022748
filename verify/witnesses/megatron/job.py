"""A Megatron rank's task and its report, both JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from converters.megatron.parallel import ParallelSizes
from verify.witnesses.engine.job import Judged

Verdict = Literal["equal", "differs", "unwritten", "unknown"]


class Box(NamedTuple):
    """A part of a tensor on disk, and whether the rank that reads it is the one that would also save it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    main: bool


@dataclass(frozen=True)
class RankJob:
    """One rank's task. The ranks meet through the file `store`; the outcome goes to `report`.

    `hf` gives the config of a checkpoint that carries none. The parameters (of `dtype`) are compared with `source`, or
    without one with the checkpoint's own bytes, read without Megatron. With `prompts` (token ids) one rank holds the
    whole model and judges them, and nothing is compared. `at_once` is not 0 where each rank is alone, without a process
    group: then so many run at a time. `trainer`: the root from which Megatron-LM's own `load_checkpoint` is to load.
    """

    checkpoint: str
    hf: str | None
    source: str | None
    sizes: ParallelSizes
    rank: int
    store: str
    report: str
    dtype: str
    transformer_engine: bool = False
    prompts: Sequence[Sequence[int]] = ()
    stream: str | None = None
    at_once: int = 0
    trainer: str | None = None

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> RankJob:
        """The job written by `save`."""
        values = json.loads(path.read_text())
        return RankJob(**{**values, "sizes": ParallelSizes(**values["sizes"])})


@dataclass(frozen=True)
class TensorSeen:
    """One parameter or persistent buffer of a rank, against the slice that it ought to hold.

    `unwritten`: every element is still the poison set before loading. `unknown`: no rule, or nothing to compare with.
    `largest` is the largest absolute difference, `dtype` what Megatron holds it in. `told`: in words, which part of it
    is wrong and what stands there. `origins`: the other global tensors whose slice it holds, where any were found.
    """

    local: str
    name: str
    verdict: Verdict
    nbytes: int
    elements: int
    differing: int = 0
    largest: float = 0.0
    told: str = ""
    origins: tuple[str, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class RankReport:
    """What one rank saw. `layers`: global layers of each model chunk, as Megatron numbers them, from 0; `mtp`: how many
    multi-token prediction layers each chunk has.

    `missing`: keys on disk that no rank asked for. `asked`: what it read of each key on disk. `unexpected`: keys that
    this rank asked for and the disk lacks. `refused`: names on which `load_state_dict` was not strict. `requested`: how
    many keys it asked for. `judged`: what Megatron makes of each prompt, on ranks of the last pipeline stage. `stream`:
    the file with what this rank computed at its stages, if it is the first of the ranks that compute the same.
    `renamed`: keys on disk of norms that it asked for by another name, that of Megatron's local spec.
    """

    rank: int
    version: str
    tp: int
    pp: int
    ep: int
    layers: tuple[tuple[int, ...], ...]
    requested: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    refused: tuple[str, ...]
    tensors: tuple[TensorSeen, ...]
    judged: tuple[Judged, ...] = ()
    mtp: tuple[int, ...] = ()
    asked: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    stream: str | None = None
    renamed: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Writes the report as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> RankReport:
        """The report written by `save`."""
        values: Mapping[str, Any] = json.loads(path.read_text())
        tuples = {key: tuple(values[key]) for key in ("missing", "unexpected", "refused", "mtp", "renamed")}
        layers = tuple(tuple(chunk) for chunk in values["layers"])
        seen = tuple(TensorSeen(**{**one, "origins": tuple(one["origins"])}) for one in values["tensors"])
        judged = tuple(Judged(**one) for one in values["judged"])
        asked = {
            key: tuple(Box(tuple(offsets), tuple(sizes), main) for offsets, sizes, main in boxes)
            for key, boxes in values["asked"].items()
        }
        more = {"layers": layers, "tensors": seen, "judged": judged, "asked": asked}
        return RankReport(**{**values, **tuples, **more})
