"""What a live engine is asked to do, and what it showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptkit.verify.witnesses.loading.job import ONE_RANK, EngineSizes
from ckptkit.verify.witnesses.reference.job import Ids, Judged

FIRST, AGAIN = "after the start", "after the start, asked again"  # names of passes; others are steps
RESUMED = "releasing, resuming and updating by tensor"  # the step's name
DRAFT = "draft."  # stands before names of a draft model's tensors, as in SGLang's own checksums


@dataclass(frozen=True)
class EngineJob:
    """An engine serves an HF directory."""

    checkpoint: str
    prompts: Ids  # token ids to answer
    report: str = ""  # read-backs are written beside it
    sizes: EngineSizes = ONE_RANK
    update: bool = False  # the whole checkpoint is loaded again, twice by tensor and twice from disk
    release_resume: bool = False  # memory is released and resumed, then weights are updated
    draft: bool = False  # it decodes speculatively, with the directory's multi-token prediction layers
    adapter: str = ""  # the module that starts it (`live.server.LiveAdapter`)

    @property
    def reloads(self) -> bool:
        """Whether weights are loaded a second time."""
        return self.update or self.release_resume


@dataclass(frozen=True)
class Reload:
    """What a second load left. Tensors by the engine's names."""

    name: str
    refused: str = ""  # why it did not load
    changed: Sequence[str] = ()  # found by our read-back unlike those of the first load
    unequal: Sequence[str] = ()  # named by the engine's own checker
    tried: bool = True  # False: not, since that would end the engine


@dataclass(frozen=True)
class EngineReport:
    """What a live engine showed."""

    version: str
    device: str
    passes: Mapping[str, Sequence[Judged]]  # the answers to all prompts, by when they were given
    held: int = 0  # how many tensors are read back of all ranks
    held_bytes: int = 0
    volatile: Sequence[str] = ()  # what changes between requests, such as a kernel's workspace; not in `Reload`
    reloads: Sequence[Reload] = ()
    complete: bool = False  # False: the engine died in a later step
    draft_held: int = 0  # of `held`, those of a draft model, whose names begin with DRAFT
