"""The protocol of an engine: facts without an import of it, and its adapter, imported only in a witness's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ckptkit.verify.quirks import installed, quirks
from ckptkit.verify.witnesses.loading.job import ONE_RANK, EngineSizes
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ckptkit.verify.witnesses.loading.layouts.layout import Layout

Weights = Iterator[tuple[str, "Tensor"]]
Feed = Callable[..., Weights]  # yields all tensors, or those that a predicate on their names selects
Loading = Callable[["nn.Module", Weights, "torch.device"], None]
# Observes a step on a module: its name, itself, and the layout that the step gives its parameters, or None for none.
Watch = Callable[[str, "nn.Module", "Layout | None"], AbstractContextManager[None]]


@dataclass(frozen=True)
class EngineFacts:
    name: str  # of its package, of the stage of its checks, and in `against`
    label: str  # in messages
    codes: str  # prefix of the codes of its checks
    tested: tuple[str, ...]  # its releases
    install: str  # the commands that install it
    adapter: str  # the module that is its `Engine`
    sizes: str  # its possible parallel sizes
    server: str  # the command that serves a model
    on_cpu: str  # the report of `ckptkit doctor` without a GPU
    hidden: tuple[str, ...] = ()  # environment variables removed for its witness
    stages: bool = False  # has pipeline stages
    attention_whole: bool = False  # each rank can hold all attention heads
    shares_experts: bool = True  # expert parallelism may be smaller than tensor parallelism
    live: str = ""  # the module that serves a checkpoint with it (`ckptkit.verify.witnesses.live.server.LiveAdapter`)
    fuses_shared: Callable[[Iterable[str]], bool] = lambda names: False  # loads the shared expert as a routed one
    not_reloadable: Callable[[Iterable[str]], list[str]] = lambda names: []  # those that it cannot load again
    cpu_package: str | None = None  # the distribution that serves without a GPU
    updates_draft: bool = False  # the witness updates a running engine's draft model too
    without_gpu: tuple[tuple[str, str], ...] = ()  # environment variables of a second attempt without a GPU

    def has_default(self, param: str) -> bool:
        """Whether the engine gives a parameter a value that remains unless a checkpoint contains another."""
        return any(one.is_about(param, {}) for one in quirks(self.name, "default_ok", installed(self.name)))


@dataclass(frozen=True)
class ModelBuild:
    path: Path  # the directory that has its config
    scratch: Path  # shared by all ranks
    config: Mapping[str, Any] = field(default_factory=dict)  # of the checkpoint
    weights: Feed | None = None  # or None if the engine reads those in `path`
    reference: Feed = lambda: iter(())  # the tensors that the model must hold
    fused_shared: bool = False  # the shared expert becomes one more routed expert, by `fuses_shared`
    sizes: EngineSizes = ONE_RANK
    rank: int = 0
    draft: bool = False  # builds the draft model of the multi-token prediction layers instead


class Engine(Protocol):
    """An adapter. Parameters and modules have the engine's names, tensors those of HF."""

    FACTS: EngineFacts  # its name is also that of its logger
    LOAD: Phase  # exceptions are the engine's verdict on the weights
    REPACK: Phase  # exceptions are the verdict of its kernels

    def build(self, wanted: ModelBuild, loading: Loading, phases: ExitReport) -> nn.Module:
        """Builds the model, with `loading` as its default loader. Raises CkptkitError without a draft model."""

    def run_after_loading(self, model: nn.Module, watch: Watch) -> None:
        """Runs the engine's steps after loading, in its order and each under `watch`."""

    def share(self, target: Any, draft: Any) -> None:
        """Gives a loaded draft model the embeddings and the output layer of its target, as in serving."""

    def emulated_device(self) -> str | None:
        """The device for which the engine chooses kernels while tensors are on the CPU, or None for their own."""

    def left_empty(self, param: str, config: Mapping[str, Any]) -> bool:
        """Whether the engine allocates a parameter that no checkpoint fills."""
