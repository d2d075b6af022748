"""Runs what an engine does to layers after loading, and checks that every weight comes out as its kernels need it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from verify.witnesses.loading.bits import difference
from verify.witnesses.loading.compare import Comparison, Loaded
from verify.witnesses.loading.engine import Step
from verify.witnesses.loading.job import Observation
from verify.witnesses.loading.layouts.layout import Difference, Expected, Outcome
from verify.witnesses.process.exit_report import Phase, PhaseLog

COMPARE = Phase("comparing what was loaded")


@dataclass
class Repacking:
    """What was seen while a model's layers were repacked, one after the other."""

    loaded: Loaded
    names: Mapping[int, str]  # of parameters, by address
    wrong: list[Observation] = field(default_factory=list)
    repacked: set[str] = field(default_factory=set)  # parameters that must be in their kernel's layout
    unchanged: set[str] = field(default_factory=set)  # parameters that must be as loaded
    touched: set[str] = field(default_factory=set)  # those of them that changed
    free: set[str] = field(default_factory=set)  # parameters that may change in ways not predicted here
    unchecked: list[str] = field(default_factory=list)
    requantized: dict[str, float] = field(default_factory=dict)  # parameters in new scales: the largest change, of 1

    def run(self, step: Step, phases: PhaseLog) -> None:
        """Runs the step of a module, and compares what it made."""
        name, module = step.name, step.module
        expected = step.layout(module) if step.layout else Expected(frozenset(), Outcome)
        others = self._others(module, expected.params)
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
        self.wrong += [_observed(name, difference) for difference in outcome.differences]
        self.requantized |= {f"{name}.{parameter}": change for parameter, change in outcome.requantized.items()}

    def _others(self, module: nn.Module, judged: Collection[str]) -> dict[str, tuple[str, Tensor]]:
        """The other parameters and buffers of a module: by its name for each, the model's, and a copy."""
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        return {
            parameter: (self.names[tensor.data_ptr()], tensor.detach().clone())
            for parameter, tensor in own
            if tensor.data_ptr() in self.names and parameter not in judged
        }


def _has_changed(module: nn.Module, parameter: str, copy: Tensor) -> bool:
    now = getattr(module, parameter, None)
    return now is None or now.dtype != copy.dtype or difference(now.detach(), copy) is not None


def _observed(name: str, seen: Difference) -> Observation:
    where = f"{name}.{seen.param}" if seen.expert is None else f"{name}.{seen.param}[{seen.expert}]"
    return Observation(where, where, seen.what)


def repack(
    loaded: Loaded,
    equal: Mapping[str, int],
    model: nn.Module,
    tensors: Callable[[], Mapping[str, Tensor]],
    reference: Callable[[], Iterable[tuple[str, Tensor]]],
    phases: PhaseLog,
) -> Repacking:
    """Repacks a model step by step, as its engine's loader does; all else must stay as it was.

    `equal`: the tensors that were right before. `tensors` gives what the model holds afterwards.
    """
    names = {tensor.data_ptr(): name for name, tensor in reversed([*loaded.tensors.items()]) if tensor.numel()}
    dead = list(loaded.dead_routers())
    seen = Repacking(loaded, names)
    for step in [*loaded.engine.steps_after_loading(model)]:  # a layout may ask what another step will change
        seen.run(step, phases)
    after = replace(loaded, tensors=tensors())
    again = after.compare(reference(), seen.touched.__contains__) if seen.touched else Comparison()
    moved = [one for one in again.differing if one.tensor in equal]
    seen.wrong += [one for one in moved if one.param not in seen.free]
    seen.wrong += [one for one in after.dead_routers() if one not in dead]
    return seen
