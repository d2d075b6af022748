"""A training job of any stack: its roles, the weights and ranks of each, and the settings of its launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.arguments import LaunchArguments
from ckptkit.verify.launch.options.arguments import Arguments
from ckptkit.verify.launch.options.speculative import Speculation
from ckptkit.verify.launch.settings.config import Config
from ckptkit.verify.launch.settings.tree import Tree
from ckptkit.verify.launch.sides import Side
from ckptkit.verify.launch.stacks.sizes import GpuPlacement
from ckptkit.verify.launch.words import LaunchText, Word


@dataclass(frozen=True)
class PreflightOptions:
    """Paths and sizes from preflight's own options. A size of 1 counts as not given."""

    hf_checkpoint: Path | None = None
    load: Path | None = None
    ref_load: Path | None = None
    ckpt_step: int | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def sizes(self) -> Mapping[str, int]:
        """The parallel sizes by name."""
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep}


@dataclass(frozen=True)
class Launch:
    """A launch before its stack makes a `Job` of it."""

    text: LaunchText
    options: PreflightOptions = PreflightOptions()
    environment: Mapping[str, str] = field(default_factory=dict)  # as the job sees it
    settings: Config = field(default_factory=lambda: Config({}))  # YAML files and overrides; empty for options


@dataclass(frozen=True)
class Stack:
    """A training program, and the rules by which its launches are read."""

    name: str
    read: Callable[[Launch], Job]  # raises CkptkitError for values that the stack itself refuses to parse
    names: Callable[[], Mapping[str, str]] = dict  # options and their release; empty: it stops at an unknown one
    unknown: str = ""  # its reaction to an unknown option
    fits: Callable[[Mapping[str, Tree]], bool] = lambda tree: False  # whether settings are for this stack
    models: frozenset[str] = frozenset()  # the keys of the model that --hf-checkpoint replaces
    own: re.Pattern[str] | None = None  # names of the stack's files of settings, which contain its defaults
    groups: frozenset[str] = frozenset()  # folders of such files, from which `folder=file` chooses one
    source: str = "in the settings of the job"  # the place of the sizes, for messages
    one_model: bool = False  # every role is built by the same arguments
    vllm_readers: tuple[str, ...] = ("vllm",)  # the readers of an INT4 checkpoint that vLLM serves

    def is_own(self, name: str) -> bool:
        """Whether a file of settings is the stack's own, by its name."""
        return self.own is not None and self.own.fullmatch(name) is not None


@dataclass(frozen=True)
class TrainedAdapter:
    """The LoRA adapter that a trainer trains. `rank` and `targets` are "" if the launch does not give them."""

    rank: str
    targets: str
    engine: str  # how the engine gets it, for messages
    asked_by: str  # the option or setting that requires it

    def __str__(self) -> str:
        rank = f" of rank {self.rank}" if self.rank else ""
        targets = f" on {self.targets}" if self.targets else ""
        return f"adapter{rank}{targets} ({self.asked_by}): {self.engine}"


@dataclass(frozen=True)
class Job:
    """A training job, read from its launch."""

    stack: Stack
    text: LaunchText = field(default_factory=LaunchText)
    root: Path = Path()  # the directory that a report names for the job
    sides: tuple[Side, ...] = ()
    hf: Path | None = None  # the HF directory with config and tokenizer
    hf_option: str = "--hf-checkpoint"  # the option or setting that gives `hf`
    models: Mapping[str, Path | None] = field(default_factory=dict)  # HF directories of roles with another model
    sizes: Mapping[str, LaunchArguments] = field(default_factory=dict)  # by role
    sizes_at: Mapping[str, Word] = field(default_factory=dict)  # the words that give the actor's sizes
    sharing: tuple[tuple[str, str], ...] = ()  # pairs of roles that start from the same weights
    placement: GpuPlacement | None = None  # None: the launch counts no GPUs
    speculation: Speculation | None = None
    adapter: TrainedAdapter | None = None  # trained instead of the weights, or None, also if unknown
    updates: bool = False  # a trainer sends weights to the engine, quantized by its `ignore` list
    arguments: Arguments = field(default_factory=Arguments)  # options of Megatron, slime and the engine
    written: Mapping[str, Word] = field(default_factory=dict)  # every option or setting of the launch, by name
    combinations: tuple[Issue, ...] | None = None  # options that conflict, or None without known rules
    unread: tuple[str, ...] = ()  # a line for each relevant part of the launch that is not read, or unresolved
    notes: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()  # notes on words that preflight's own options contradict

    @property
    def actor(self) -> LaunchArguments:
        """The sizes of the trainer."""
        return self.sizes.get("actor", LaunchArguments())

    @property
    def bridge(self) -> bool:
        """Whether miles builds and loads the model by Megatron-Bridge, from the HF directory."""
        return bool(self.arguments.value("megatron_to_hf_mode") == "bridge")

    def sides_with_weights(self) -> list[Side]:
        """The sides that load weights of this machine."""
        return [side for side in self.sides if side.path]
