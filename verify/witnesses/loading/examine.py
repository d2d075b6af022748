"""What a witness runs where an engine would load: poison, the model's own loading, comparison, repacking."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.core.printable import one_line
from verify.witnesses.loading.bits import difference, poison
from verify.witnesses.loading.compare import Comparison, Loaded
from verify.witnesses.loading.draft import DraftLoaded, without_shared
from verify.witnesses.loading.engine import Engine, Step, Weights
from verify.witnesses.loading.job import ONE_RANK, EngineSizes, LoadReport, Observation, PartialTensor
from verify.witnesses.loading.layouts.layout import LayerExpected, LayerOutcome, ParamDifference
from verify.witnesses.loading.names import draft_names
from verify.witnesses.loading.placement import Placement
from verify.witnesses.loading.trace import Trace
from verify.witnesses.process.exit_report import Phase, PhaseLog

COMPARE = Phase("comparing what was loaded")
Reference = Callable[[], Iterable[tuple[str, Tensor]]]  # every tensor that must be in the model, at each call anew


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
    reference: Reference
    alter: Callable[[Weights], Weights]  # changes the weights
    phases: PhaseLog
    sizes: EngineSizes = ONE_RANK
    target: tuple[nn.Module, Loaded] | None = None  # the model that this one drafts for, and what was seen of it
    loaded: Loaded = field(init=False)
    seen: LoadReport = field(init=False)  # without what `report` says of the engine and the model

    def __call__(self, model: nn.Module, weights: Weights, device: torch.device) -> None:
        before = self._tensors(model)
        addresses = {tensor.data_ptr() for tensor in before.values() if tensor.numel()}
        poison(tensor for name, tensor in before.items() if not self.engine.FACTS.has_default(name))
        handler = _NotFound()
        logger = logging.getLogger(self.engine.FACTS.name)
        logger.addHandler(handler)
        self.phases.enter(self.engine.LOAD)
        with Trace(before.values()) as trace:
            self.engine.load(model, trace.feed(self._with_steps(self.alter(weights))))
        logger.removeHandler(handler)
        if self.target is not None:
            self.engine.share(self.target[0], model)
        self.phases.enter(COMPARE)
        self.loaded = self._loaded(trace, self._tensors(model))
        self.seen = replace(self._compared(), parameters=len(addresses), log=tuple(handler.lines))
        if device.type == "cuda":
            found = Repacking(self.loaded)
            wrong = found.repack(model, self.seen.equal, lambda: self._tensors(model), self.reference, self.phases)
            self.seen = replace(
                self.seen,
                repacked=tuple(wrong),
                repacked_seen=len(found.repacked | found.unchanged),
                unchecked=tuple(found.unchecked),
                requantized=found.requantized,
            )

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

    def _compared(self) -> LoadReport:
        loaded, names = self.loaded, list[str]()

        def noted() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in self.reference():
                names.append(name)
                yield name, tensor

        found = loaded.compare(noted())
        return LoadReport(
            *("", "", "", ""),
            sizes=self.sizes,
            loaded_names=len(loaded.sizes),
            equal=found.equal,
            partial={
                name: PartialTensor(loaded.sizes[name], [(one.offset, one.sizes, one.strides) for one in parts])
                for name, parts in ((name, loaded.parts(name)) for name in loaded.in_part)
            },
            routers_seen=len(loaded.routers()),
            unwritten=tuple(loaded.unwritten(found.equal)),
            dropped=tuple(loaded.dropped(found.equal, names)),
            differing=tuple(found.differing),
            rounded=tuple(found.rounded),
            computed=tuple(one for one in loaded.placement.computed if one not in found.computed),
            routers=tuple(loaded.dead_routers()),
            draft=tuple(draft_names(self.config, loaded.sizes)),
        )

    def report(self, model: nn.Module) -> LoadReport:
        """Everything that was seen; `model` as it is after loading."""
        first, chosen = next(model.parameters()), self.engine.chosen_for()
        cpu = f"cpu, with the choices of {chosen}" if chosen else "cpu"
        return replace(
            self.seen,
            version=version(self.engine.FACTS.name),
            model=type(model).__name__,
            device=torch.cuda.get_device_name() if first.is_cuda else cpu,
            dtype=str(first.dtype).removeprefix("torch."),
        )


@dataclass
class Repacking:
    """What was seen while a model's layers were repacked, one after the other."""

    loaded: Loaded
    repacked: set[str] = field(default_factory=set)  # parameters that must be in their kernel's layout
    unchanged: set[str] = field(default_factory=set)  # parameters that must be as loaded
    touched: set[str] = field(default_factory=set)  # those of them that changed
    free: set[str] = field(default_factory=set)  # parameters that may change in ways not predicted here
    unchecked: list[str] = field(default_factory=list)
    requantized: dict[str, float] = field(default_factory=dict)  # parameters in new scales: the largest change, of 1

    def repack(
        self,
        model: nn.Module,
        equal: Mapping[str, int],
        tensors: Callable[[], Mapping[str, Tensor]],
        reference: Reference,
        phases: PhaseLog,
    ) -> list[Observation]:
        """Repacks a model step by step, as its engine's loader does; what is wrong then. All else must stay as it was.

        `equal`: the tensors that were right before. `tensors` gives what the model holds afterwards.
        """
        held = [*self.loaded.tensors.items()]
        names = {tensor.data_ptr(): name for name, tensor in reversed(held) if tensor.numel()}
        dead = list(self.loaded.dead_routers())
        steps = [*self.loaded.engine.steps_after_loading(model)]  # a layout may ask what another step will change
        found = [(f"{step.name}.{one.param}", one) for step in steps for one in self._run(step, names, phases)]
        places = [(place if one.expert is None else f"{place}[{one.expert}]", one.what) for place, one in found]
        wrong = [Observation(place, place, what) for place, what in places]
        after = replace(self.loaded, tensors=tensors())
        again = after.compare(reference(), self.touched.__contains__) if self.touched else Comparison()
        wrong += [one for one in again.differing if one.tensor in equal and one.param not in self.free]
        return wrong + [one for one in after.dead_routers() if one not in dead]

    def _run(self, step: Step, names: Mapping[int, str], phases: PhaseLog) -> list[ParamDifference]:
        """Runs the step of a module, and compares what it made. `names`: of parameters, by address."""
        name, module = step.name, step.module
        expected = step.layout(module) if step.layout else LayerExpected(frozenset(), LayerOutcome)
        others = {  # the other parameters and buffers: by its name for each, the model's, and a copy
            parameter: (names[tensor.data_ptr()], tensor.detach().clone())
            for parameter, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if tensor.data_ptr() in names and parameter not in expected.params
        }
        own = {known for known, _ in others.values()}
        self.repacked |= {f"{name}.{parameter}" for parameter in expected.params}
        self.unchanged |= own
        phases.enter(self.loaded.engine.REPACK)
        step.run()
        phases.enter(COMPARE)
        changed = {known for parameter, (known, copy) in others.items() if _has_changed(module, parameter, copy)}
        self.touched |= changed
        outcome = expected.compare()
        if expected.free:
            self.free |= own
        if outcome.unknown and (changed or not expected.free):
            self.unchecked.append(f"{name}: {outcome.unknown}")
        self.requantized |= {f"{name}.{parameter}": change for parameter, change in outcome.requantized.items()}
        return outcome.differences


def _has_changed(module: nn.Module, parameter: str, copy: Tensor) -> bool:
    now = getattr(module, parameter, None)
    return now is None or now.dtype != copy.dtype or difference(now.detach(), copy) is not None
