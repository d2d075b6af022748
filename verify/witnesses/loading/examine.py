"""What a witness runs where an engine would load: poison, the model's own loading, comparison, repacking."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.core.printable import one_line
from verify.witnesses.loading.bits import poison
from verify.witnesses.loading.compare import Comparison, Loaded
from verify.witnesses.loading.draft import DraftLoaded, without_shared
from verify.witnesses.loading.engine import Engine, Weights
from verify.witnesses.loading.job import ONE_RANK, EngineSizes, LoadReport, Observation, PartialTensor
from verify.witnesses.loading.names import draft_names
from verify.witnesses.loading.placement import Placement
from verify.witnesses.loading.repacking import COMPARE, repack
from verify.witnesses.loading.trace import Trace
from verify.witnesses.process.exit_report import PhaseLog


class _NotFound(logging.Handler):
    """Keeps what an engine's loaders say of names that they do not know."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the message when it says that something was not found."""
        if "not found" in record.getMessage():
            self.lines.append(one_line(record.getMessage()))


@dataclass
class Examination:
    """One load and what it showed; the engine's loader calls it with the model, the weights and the device."""

    engine: Engine
    config: Mapping[str, Any]
    fused_shared: bool
    reference: Callable[[], Iterable[tuple[str, Tensor]]]  # every tensor that must be in the model, at each call anew
    alter: Callable[[Weights], Weights]  # changes the weights
    phases: PhaseLog
    sizes: EngineSizes = ONE_RANK
    target: tuple[nn.Module, Loaded] | None = None  # the model that this one drafts for, and what was seen of it
    parameters: int = 0
    loaded: Loaded = field(init=False)
    comparison: Comparison = field(default_factory=Comparison)
    unwritten: tuple[Observation, ...] = ()
    dropped: tuple[Observation, ...] = ()
    routers: tuple[Observation, ...] = ()
    log: tuple[str, ...] = ()
    repacked: tuple[Observation, ...] | None = None
    repacked_seen: int = 0
    unchecked: tuple[str, ...] = ()
    requantized: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, model: nn.Module, weights: Weights, device: torch.device) -> None:
        before = self._tensors(model)
        self.parameters = len({tensor.data_ptr() for tensor in before.values() if tensor.numel()})
        poison(tensor for name, tensor in before.items() if not self.engine.has_default(name))
        handler = _NotFound()
        logger = logging.getLogger(self.engine.PACKAGE)
        logger.addHandler(handler)
        self.phases.enter(self.engine.LOAD)
        with Trace(before.values()) as trace:
            self.engine.load(model, trace.feed(self._with_steps(self.alter(weights))))
        logger.removeHandler(handler)
        if self.target is not None:
            self.engine.share(self.target[0], model)
        self.phases.enter(COMPARE)
        self.log = tuple(handler.lines)
        self.loaded = self._loaded(trace, self._tensors(model))
        self._examine(self.loaded)
        if device.type == "cuda":
            self._repack(model)

    def _with_steps(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            self.phases.step(f"the last tensor it was given: {name}")
            yield name, tensor
        self.phases.step("by then it had been given every tensor")

    def _loaded(self, trace: Trace, tensors: Mapping[str, Tensor]) -> Loaded:
        sizes = {name: block.numel for name, block in trace.given.items()}
        placement = Placement.of(trace, tensors)
        if self.target is None:
            return Loaded(self.engine, self.config, tensors, placement, sizes, self.sizes.ranks)
        own = {name: sizes[name] for name in draft_names(self.config, sizes)}
        return DraftLoaded(self.engine, self.config, tensors, placement, own, self.sizes.ranks, self.target[1])

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        found = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        return found if self.target is None else without_shared(found, self.target[1].tensors)

    def _examine(self, loaded: Loaded) -> None:
        names: list[str] = []
        self.comparison = loaded.compare(_noted(self.reference(), names))
        equal = self.comparison.equal
        self.unwritten = tuple(loaded.unwritten(equal))
        self.dropped = tuple(loaded.dropped(equal, names))
        self.routers = tuple(loaded.dead_routers())

    def _repack(self, model: nn.Module) -> None:
        equal, after = self.comparison.equal, partial(self._tensors, model)
        seen = repack(self.loaded, equal, model, after, self.reference, self.phases)
        self.unchecked = tuple(seen.unchecked)
        self.requantized = seen.requantized
        self.repacked = tuple(seen.wrong)
        self.repacked_seen = len(seen.repacked | seen.unchanged)

    def _partial(self, name: str) -> PartialTensor:
        parts = self.loaded.parts(name)
        return PartialTensor(self.loaded.sizes[name], [(part.offset, part.sizes, part.strides) for part in parts])

    def _cpu(self) -> str:
        chosen = self.engine.chosen_for()
        return f"cpu, with the choices of {chosen}" if chosen else "cpu"

    def report(self, model: nn.Module) -> LoadReport:
        """Everything that was seen; `model` as it is after loading."""
        first = next(model.parameters())
        return LoadReport(
            version=version(self.engine.PACKAGE),
            model=type(model).__name__,
            device=torch.cuda.get_device_name() if first.is_cuda else self._cpu(),
            dtype=str(first.dtype).removeprefix("torch."),
            sizes=self.sizes,
            fused_shared=self.fused_shared,
            parameters=self.parameters,
            loaded_names=len(self.loaded.sizes),
            equal=self.comparison.equal,
            partial={name: self._partial(name) for name in self.loaded.in_part},
            routers_seen=len(self.loaded.routers()),
            unwritten=self.unwritten,
            dropped=self.dropped,
            differing=tuple(self.comparison.differing),
            rounded=tuple(self.comparison.rounded),
            computed=tuple(one for one in self.loaded.placement.computed if one not in self.comparison.computed),
            routers=self.routers,
            draft=tuple(draft_names(self.config, self.loaded.sizes)),
            log=self.log,
            repacked=self.repacked,
            repacked_seen=self.repacked_seen,
            unchecked=self.unchecked,
            requantized=self.requantized,
        )


def _noted(pairs: Iterable[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in pairs:
        names.append(name)
        yield name, tensor
