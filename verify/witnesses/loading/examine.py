"""What a witness runs where an engine would load: poison, the model's own loading, comparison, repacking."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from logging.handlers import BufferingHandler
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.core.printable import one_line
from verify.witnesses.loading.bits import difference, poison
from verify.witnesses.loading.compare import Loaded
from verify.witnesses.loading.draft import DraftLoaded, without_shared
from verify.witnesses.loading.engine import Engine, Weights
from verify.witnesses.loading.job import ONE_RANK, EngineSizes, LoadReport, Observation
from verify.witnesses.loading.layouts.layout import LayerExpected, LayerOutcome
from verify.witnesses.loading.names import draft_names
from verify.witnesses.loading.placement import Placement
from verify.witnesses.loading.trace import Trace
from verify.witnesses.process.exit_report import Phase, PhaseLog

COMPARE = Phase("comparing what was loaded")
Reference = Callable[[], Iterable[tuple[str, Tensor]]]  # every tensor that must be in the model, at each call anew


@dataclass
class Examination:
    """One load and what it showed; the engine's loader calls it with the model, the weights and the device."""

    engine: Engine
    config: Mapping[str, Any]
    reference: Reference
    alter: Callable[[Weights], Weights]  # changes the weights
    phases: PhaseLog
    sizes: EngineSizes = ONE_RANK
    target: Examination | None = None  # of the model that this one drafts for
    model: nn.Module = field(init=False)
    loaded: Loaded = field(init=False)
    report: LoadReport = field(init=False)

    def __call__(self, model: nn.Module, weights: Weights, device: torch.device) -> None:
        self.model = model
        before = self._tensors()
        addresses = {tensor.data_ptr() for tensor in before.values() if tensor.numel()}
        poison(tensor for name, tensor in before.items() if not self.engine.FACTS.has_default(name))
        warnings = BufferingHandler(sys.maxsize)
        warnings.setLevel(logging.WARNING)
        logger = logging.getLogger(self.engine.FACTS.name)
        logger.addHandler(warnings)
        self.phases.enter(self.engine.LOAD)
        with Trace(before.values()) as trace:
            model.load_weights(trace.feed(self._with_steps(self.alter(weights))))  # type: ignore[operator]
        logger.removeHandler(warnings)
        if self.target is not None:
            self.engine.share(self.target.model, model)
        self.phases.enter(COMPARE)
        self.loaded = self._loaded(trace)
        lines = [record.getMessage() for record in warnings.buffer]
        self.report = replace(
            self._blank(), parameters=len(addresses), log=tuple(one_line(line) for line in lines if "not found" in line)
        )
        self._compare()
        if device.type == "cuda":
            self._repack()

    def _with_steps(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            self.phases.step(f"the last tensor it was given: {name}")
            yield name, tensor
        self.phases.step("by then it had been given every tensor")

    def _loaded(self, trace: Trace) -> Loaded:
        tensors = self._tensors()
        sizes = {name: block.numel for name, block in trace.given.items()}
        placement = Placement.of(trace, tensors)
        if self.target is None:
            return Loaded(self.engine, self.config, tensors, placement, sizes, self.sizes.ranks)
        own = {name: sizes[name] for name in draft_names(self.config, sizes)}
        return DraftLoaded(self.engine, self.config, tensors, placement, own, self.sizes.ranks, self.target.loaded)

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: tensor.detach() for name, tensor in self.model.state_dict(keep_vars=True).items()}
        return found if self.target is None else without_shared(found, self.target.loaded.tensors)

    def _blank(self) -> LoadReport:
        """A report with what the engine and its model are."""
        first, chosen = next(self.model.parameters()), self.engine.chosen_for()
        cpu = f"cpu, with the choices of {chosen}" if chosen else "cpu"
        return LoadReport(
            version=version(self.engine.FACTS.name),
            model=type(self.model).__name__,
            device=torch.cuda.get_device_name() if first.is_cuda else cpu,
            dtype=str(first.dtype).removeprefix("torch."),
            sizes=self.sizes,
        )

    def _compare(self) -> None:
        """Fills in what was loaded, against the reference."""
        loaded, report, names = self.loaded, self.report, list[str]()

        def noted() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in self.reference():
                names.append(name)
                yield name, tensor

        loaded.compare(report, noted())
        report.loaded_names = len(loaded.sizes)
        report.partial = {name: (loaded.sizes[name], loaded.parts(name)) for name in loaded.in_part}
        report.routers_seen = len(loaded.routers())
        report.unwritten = tuple(loaded.unwritten(report.equal))
        report.dropped = tuple(loaded.dropped(report.equal, names))
        report.routers = tuple(loaded.dead_routers())
        report.draft = tuple(draft_names(self.config, loaded.sizes))

    def _repack(self) -> None:
        """Repacks the model step by step, as its engine does. All that no layout covers must stay as it was."""
        loaded, report = self.loaded, self.report
        held = [*loaded.tensors.items()]
        names = {tensor.data_ptr(): name for name, tensor in reversed(held) if tensor.numel()}
        dead = list(loaded.dead_routers())
        wrong = list[Observation]()
        compared, touched, free = set[str](), set[str](), set[str]()  # parameters; `free`: may change in unknown ways
        for step in [*self.engine.steps_after_loading(self.model)]:  # a layout may ask what another step will change
            name, module = step.name, step.module
            expected = step.layout(module) if step.layout else LayerExpected(frozenset(), LayerOutcome)
            others = {  # the other parameters and buffers: by its name for each, the model's, and a copy
                parameter: (names[tensor.data_ptr()], tensor.detach().clone())
                for parameter, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                if tensor.data_ptr() in names and parameter not in expected.params
            }
            own = {known for known, _ in others.values()}
            self.phases.enter(self.engine.REPACK)
            step.run()
            self.phases.enter(COMPARE)
            changed = {known for parameter, (known, copy) in others.items() if _has_changed(module, parameter, copy)}
            outcome = expected.compare()
            for one in outcome.differences:
                place = f"{name}.{one.param}" if one.expert is None else f"{name}.{one.param}[{one.expert}]"
                wrong.append(Observation(place, place, one.what))
            compared |= own | {f"{name}.{parameter}" for parameter in expected.params}
            touched |= changed
            free |= own if expected.free else set()
            if outcome.unknown and (changed or not expected.free):
                report.unchecked += (f"{name}: {outcome.unknown}",)
            report.requantized |= {f"{name}.{parameter}": part for parameter, part in outcome.requantized.items()}
        after = replace(loaded, tensors=self._tensors())
        again = replace(report, equal={}, differing=())
        if touched:
            after.compare(again, self.reference(), touched.__contains__)
        wrong += [one for one in again.differing if one.tensor in report.equal and one.param not in free]
        wrong += [one for one in after.dead_routers() if one not in dead]
        report.repacked, report.repacked_seen = tuple(wrong), len(compared)


def _has_changed(module: nn.Module, parameter: str, copy: Tensor) -> bool:
    now = getattr(module, parameter, None)
    return now is None or now.dtype != copy.dtype or difference(now.detach(), copy) is not None
