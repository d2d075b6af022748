"""What a Megatron rank is asked to load, and what it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.verify.witnesses.reference.job import Judged

# `unwritten`: every element is still the poison set before loading. `unknown`: no rule, or nothing to compare with.
Verdict = Literal["equal", "differs", "unwritten", "unknown"]


class Box(NamedTuple):
    """A part of a tensor on disk, and whether the rank that reads it is the one that would also save it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    main: bool


@dataclass(frozen=True)
class RankJob:
    """One rank's task."""

    checkpoint: Path
    hf: Path | None  # gives the config of a checkpoint that carries none
    source: Path | None  # what parameters are compared with; None: the checkpoint's own bytes, read without Megatron
    sizes: ParallelSizes
    dtype: str  # of the parameters
    rank: int = 0
    report: str = ""
    gpu: bool = False  # it has one
    transformer_engine: bool = False
    hybrid: bool = False  # the checkpoint holds a HybridModel, not a GPTModel
    prompts: Sequence[Sequence[int]] = ()  # token ids; with them nothing is compared
    at_once: int = 0  # how many run at a time, each without a process group; 0: all, in one group
    trainer: Path | None = None  # the root from which Megatron-LM's own `load_checkpoint` is to load


@dataclass(frozen=True)
class TensorSeen:
    """One parameter or persistent buffer of a rank, against the slice that it ought to hold."""

    local: str
    name: str
    verdict: Verdict
    nbytes: int
    elements: int
    differing: int = 0
    largest: float = 0.0  # absolute difference
    diagnosis: str = ""  # which part of it is wrong, and what stands there
    origins: tuple[str, ...] = ()  # the other global tensors whose slice it holds, where any were found
    dtype: str = ""  # what Megatron holds it in


@dataclass(frozen=True)
class RankReport:
    """What one rank saw."""

    rank: int
    version: str
    tp: int
    pp: int
    ep: int
    layers: tuple[tuple[int, ...], ...]  # global layers of each model chunk, as Megatron numbers them, from 0
    requested: int  # how many keys it asked for
    missing: tuple[str, ...]  # keys on disk that no rank asked for
    unexpected: tuple[str, ...]  # keys that it asked for and the disk lacks
    refused: tuple[str, ...]  # names on which `load_state_dict` was not strict
    tensors: tuple[TensorSeen, ...]
    judged: tuple[Judged, ...] = ()  # of each prompt, on ranks of the last pipeline stage
    mtp: tuple[int, ...] = ()  # how many multi-token prediction layers each chunk has
    asked: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)  # what it read of each key on disk
    renamed: tuple[str, ...] = ()  # keys of norms that it asked for by another name, that of Megatron's local spec
