"""The protocol that every engine stands behind: facts about it, and how it builds and loads a model.

`EngineFacts` need no import of the engine. Its adapter, a module that is an `Engine`, is imported in a witness's
process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptkit.verify.quirks import installed, quirks
from ckptkit.verify.witnesses.loading.job import ONE_RANK, EngineSizes
from ckptkit.verify.witnesses.process.exit_report import Phase, PhaseLog

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ckptkit.verify.witnesses.loading.layouts.layout import Layout

Weights = Iterator[tuple[str, "Tensor"]]
# Gives tensors: all, or those whose names the function that it is called with accepts.
Feed = Callable[..., Weights]
Loading = Callable[["nn.Module", Weights, "torch.device"], None]
# Looks at a module around a step on it: its name, itself, and what the step makes of its parameters; None: they stay as
# they are.
Watch = Callable[[str, "nn.Module", "Layout | None"], AbstractContextManager[None]]


@dataclass(frozen=True)
class EngineFacts:
    """An engine, as all but its own witness know it."""

    name: str  # of its package, of the stage of its checks, and in `against`
    label: str  # in messages
    codes: str  # what the codes of its checks begin with
    tested: tuple[str, ...]  # its releases
    install: str  # the commands that install it
    adapter: str  # the module that is its `Engine`
    sizes: str  # which parallel sizes it can have
    server: str  # the command that serves a model
    on_cpu: str  # what its witness leaves out without a GPU, as `ckptkit doctor` says it
    hidden: tuple[str, ...] = ()  # environment variables that its witness must not see
    stages: bool = False  # it can be cut into pipeline stages
    attention_whole: bool = False  # each of its ranks can keep attention whole
    shares_experts: bool = True  # of its ranks fewer than all may keep whole experts, and cut those
    live: str = ""  # the module that serves a checkpoint with it (`ckptkit.verify.witnesses.live.server.LiveAdapter`)
    # Whether a checkpoint with these names needs the shared expert as one more routed expert.
    fuses_shared: Callable[[Iterable[str]], bool] = lambda names: False
    # Of the names of a checkpoint's tensors those that a running engine cannot load a second time.
    not_reloadable: Callable[[Iterable[str]], list[str]] = lambda names: []
    cpu_package: str | None = None  # the distribution that serves without a GPU
    updates_draft: bool = False  # the witness updates a running engine's draft model too
    # Environment variables and values for another try without a GPU, where it builds nothing at the first.
    without_gpu: tuple[tuple[str, str], ...] = ()

    def has_default(self, param: str) -> bool:
        """Whether the engine gives a parameter a value that stands unless a checkpoint gives another."""
        return any(one.is_about(param, {}) for one in quirks(self.name, "default_ok", installed(self.name)))


@dataclass(frozen=True)
class ModelBuild:
    """The model that one rank is to build, the weights that it is given, and what to compare it with."""

    path: Path  # the directory that has its config
    scratch: Path  # shared by all ranks, which may meet there
    config: Mapping[str, Any] = field(default_factory=dict)  # of the checkpoint
    weights: Feed | None = None  # None: the engine reads those in `path`
    reference: Feed = lambda: iter(())  # what the model must hold
    fused_shared: bool = False  # the shared expert is kept as one more routed expert, as `fuses_shared` says
    sizes: EngineSizes = ONE_RANK
    rank: int = 0
    draft: bool = False  # the draft model for speculative decoding instead, of the multi-token prediction layers


class Engine(Protocol):
    """What an adapter offers. Parameters and modules go by the engine's own names, tensors by those of HF."""

    FACTS: EngineFacts  # its name is also that of its logger
    LOAD: Phase  # whose exceptions are the engine's verdict on the weights
    REPACK: Phase  # and on what its kernels can take

    def build(self, wanted: ModelBuild, loading: Loading, phases: PhaseLog) -> nn.Module:
        """Builds the model with the engine's default loader, which calls `loading` where it would load.

        `loading` gets the model, the weights and the device. Raises CkptkitError where there is no draft model.
        """

    def run_after_loading(self, model: nn.Module, watch: Watch) -> None:
        """Runs what the engine runs after all weights are loaded, in its order and each step under `watch`."""

    def share(self, target: Any, draft: Any) -> None:
        """Gives a loaded draft model the embeddings and the output layer of its target, as when serving."""

    def emulated_device(self) -> str | None:
        """The device whose layouts and kernels are chosen while tensors are on the CPU; None: the one they are on."""

    def left_empty(self, param: str, config: Mapping[str, Any]) -> bool:
        """Whether a parameter is allocated without anything from the checkpoint being wanted in it."""
