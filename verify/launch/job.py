"""A training job of any stack: its roles, what each of them loads and over how many ranks, and what its launch says."""

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
    """The paths and sizes that the preflight command itself gets. A size of 1 counts as not set."""

    hf_checkpoint: str | Path | None = None
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
    """A launch as it is written, of which the reader of a stack makes a `Job`.

    options: the paths and sizes of the preflight command itself.
    environment: the variables that the job sees.
    settings: its YAML files and overrides as one tree; empty for a stack that takes options.
    """

    text: LaunchText
    options: PreflightOptions = PreflightOptions()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Config = field(default_factory=lambda: Config({}))


@dataclass(frozen=True)
class Stack:
    """A program that trains, and how its launches are read: the whole of what is particular to it.

    read: makes a job of a launch. Raises CkptkitError for values that the stack itself refuses to parse.
    names: every option or setting, and the release that has it; empty for a stack that stops at another one.
    unknown: what the stack does with an option that it does not know.
    fits: whether the settings of a launch are for this stack; never, where it takes options.
    models: the keys for whose model --hf-checkpoint stands.
    own: names of the stack's own files of settings, whose values are its defaults.
    groups: folders of such files, of which `folder=file` chooses one.
    source: where a launch has its sizes, in words.
    one_model: every role is built by the same arguments.
    vllm_readers: who reads an INT4 checkpoint that vLLM serves.
    """

    name: str
    read: Callable[[Launch], Job]
    names: Callable[[], Mapping[str, str]] = dict
    unknown: str = ""
    fits: Callable[[Mapping[str, Tree]], bool] = lambda tree: False
    models: frozenset[str] = frozenset()
    own: re.Pattern[str] | None = None
    groups: frozenset[str] = frozenset()
    source: str = "in the settings of the job"
    one_model: bool = False
    vllm_readers: tuple[str, ...] = ("vllm",)

    def is_own(self, name: str) -> bool:
        """Whether a file of settings of this name is the stack's own."""
        return self.own is not None and self.own.fullmatch(name) is not None


@dataclass(frozen=True)
class TrainedAdapter:
    """The LoRA adapter that a trainer trains.

    rank, targets: as the launch gives them, or "" if it does not.
    engine: who merges it, or what the engine is started with.
    asked_by: the option or setting that asks for it.
    """

    rank: str
    targets: str
    engine: str
    asked_by: str

    def __str__(self) -> str:
        rank = f" of rank {self.rank}" if self.rank else ""
        targets = f" on {self.targets}" if self.targets else ""
        return f"adapter{rank}{targets}, by {self.asked_by}: {self.engine}"


@dataclass(frozen=True)
class Job:
    """A training job, as its launch says it.

    root: the directory that stands for the whole job in a report.
    sides: what each role loads; `hf` is the HF directory that gives config and tokenizer.
    hf_option: the option or setting that gives `hf`.
    models: the HF directories of roles with another model.
    sizes: how each role is cut, by its role; `sizes_at` where the launch says it.
    sharing: pairs of roles that start from the same weights.
    placement: what must divide the GPUs; None where the launch counts none.
    speculation: how the engine drafts.
    adapter: the adapter that is trained in place of the weights; None if there is none, or it is not known.
    updates: whether a trainer sends weights to the engine, which are quantized by its `ignore` list.
    arguments: those that the launch gives as options of Megatron, slime and the engine.
    written: every option or setting that the launch writes, by its name.
    combinations: options that do not go together; None where no such rule is known of the launch.
    unread: a line for everything that matters and is not read, or not known.
    notes: remarks on what is loaded; `replaced`: on words that preflight's own options contradict.
    """

    stack: Stack
    text: LaunchText = field(default_factory=LaunchText)
    root: Path = Path()
    sides: tuple[Side, ...] = ()
    hf: Path | None = None
    hf_option: str = "--hf-checkpoint"
    models: Mapping[str, Path | None] = field(default_factory=dict)
    sizes: Mapping[str, LaunchArguments] = field(default_factory=dict)
    sizes_at: Mapping[str, Word] = field(default_factory=dict)
    sharing: tuple[tuple[str, str], ...] = ()
    placement: GpuPlacement | None = None
    speculation: Speculation | None = None
    adapter: TrainedAdapter | None = None
    updates: bool = False
    arguments: Arguments = field(default_factory=Arguments)
    written: Mapping[str, Word] = field(default_factory=dict)
    combinations: tuple[Issue, ...] | None = None
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    @property
    def actor(self) -> LaunchArguments:
        """How the trainer is cut."""
        return self.sizes.get("actor", LaunchArguments())

    @property
    def bridge(self) -> bool:
        """Whether miles builds and loads the model by Megatron-Bridge, from the HF directory."""
        return bool(self.arguments.value("megatron_to_hf_mode") == "bridge")

    def loading(self) -> list[Side]:
        """The sides that load something here."""
        return [side for side in self.sides if side.path]
