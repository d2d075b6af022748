"""The job of a live engine, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptkit.verify.witnesses.loading.job import ONE_RANK, EngineSizes
from ckptkit.verify.witnesses.reference.job import Ids, Judged

FIRST, AGAIN = "after the start", "after the start, asked again"  # names of passes; other passes have names of steps
RESUMED = "releasing, resuming and updating by tensor"  # the step's name
DRAFT = "draft."  # prefix of the names of a draft model's tensors, as in SGLang's own checksums


@dataclass(frozen=True)
class EngineJob:
    checkpoint: str
    prompts: Ids  # token ids to answer
    report: str = ""  # read-backs are written to the same directory
    sizes: EngineSizes = ONE_RANK
    update: bool = False  # load the complete checkpoint again, twice by tensor and twice from disk
    release_resume: bool = False  # release and resume memory, then update weights
    draft: bool = False  # decode speculatively, with the directory's multi-token prediction layers
    adapter: str = ""  # the module that starts it (`live.server.LiveAdapter`)

    @property
    def reloads(self) -> bool:
        return self.update or self.release_resume


@dataclass(frozen=True)
class Reload:
    """The result of a second load. Tensors have the engine's names."""

    name: str
    refused: str = ""  # the reason why it did not load
    changed: Sequence[str] = ()  # differences from the first load, by our read-back
    unequal: Sequence[str] = ()  # differences by the engine's own checker
    tried: bool = True  # False if a try would end the engine


@dataclass(frozen=True)
class EngineReport:
    version: str
    device: str
    passes: Mapping[str, Sequence[Judged]]  # the answers to all prompts, by the name of the pass
    held: int = 0  # number of tensors read back from all ranks
    held_bytes: int = 0
    volatile: Sequence[str] = ()  # tensors that change between requests, such as a kernel's workspace; not in `Reload`
    reloads: Sequence[Reload] = ()
    complete: bool = False  # False if the engine died in a later step
    draft_held: int = 0  # number of tensors in `held` with the prefix DRAFT
