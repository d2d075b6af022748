"""The job of a Megatron rank, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.verify.witnesses.reference.job import Judged

# `unwritten`: every element is still the poison set before loading. `unknown`: there is no rule or no reference.
Verdict = Literal["equal", "differs", "unwritten", "unknown"]


class Box(NamedTuple):
    """A part of a tensor on disk, and whether the rank that reads it would also save it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    main: bool


@dataclass(frozen=True)
class RankJob:
    checkpoint: Path
    hf: Path | None  # has the config of a checkpoint without one
    source: Path | None  # the reference, or None for the checkpoint's own bytes, read without Megatron
    sizes: ParallelSizes
    dtype: str  # of the parameters
    rank: int = 0
    report: str = ""
    gpu: bool = False
    transformer_engine: bool = False
    hybrid: bool = False  # the checkpoint holds a HybridModel, not a GPTModel
    prompts: Sequence[Sequence[int]] = ()  # token ids; a job with prompts compares no tensors
    at_once: int = 0  # the number of ranks that run at a time without a process group, or 0 for all in one group
    trainer: Path | None = None  # the root from which Megatron-LM's own `load_checkpoint` loads


@dataclass(frozen=True)
class TensorSeen:
    local: str
    name: str
    verdict: Verdict
    nbytes: int
    elements: int
    differing: int = 0
    largest: float = 0.0  # absolute difference
    diagnosis: str = ""  # the wrong part of it, and its values
    origins: tuple[str, ...] = ()  # other global tensors that have its values
    dtype: str = ""  # in Megatron


@dataclass(frozen=True)
class RankReport:
    rank: int
    version: str
    tp: int
    pp: int
    ep: int
    layers: tuple[tuple[int, ...], ...]  # global layers of each model chunk, as Megatron numbers them, from 0
    requested: int  # number of requested keys
    missing: tuple[str, ...]  # keys on disk that no rank requested
    unexpected: tuple[str, ...]  # requested keys that the disk lacks
    refused: tuple[str, ...]  # names that `load_state_dict` refused
    tensors: tuple[TensorSeen, ...]
    judged: tuple[Judged, ...] = ()  # of each prompt, on ranks of the last pipeline stage
    mtp: tuple[int, ...] = ()  # number of multi-token prediction layers of each chunk
    asked: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)  # the parts read of each key on disk
    renamed: tuple[str, ...] = ()  # keys of norms that it requested by the name of Megatron's local spec
