"""Runs what an engine does to layers after loading, and checks that every weight comes out as its kernels need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from verify.witnesses.loading.bits import difference
from verify.witnesses.loading.compare import Comparison, Loaded
from verify.witnesses.loading.job import Observation
from verify.witnesses.loading.marlin import after_repacking, before_repacking, free_to_change, repacked_parameters
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

    def run(self, name: str, module: nn.Module, phases: PhaseLog) -> None:
        """Repacks a module, if the engine has something to do there."""
        engine = self.loaded.engine
        if (step := engine.post_process(module)) is None:
            return
        packed = repacked_parameters(module)
        scheme = engine.unknown_layout(module)
        if scheme:
            self.unchecked.append(f"{name}: {scheme} has a layout of its own")
        self.repacked |= {f"{name}.{parameter}" for parameter in packed}
        self.free |= {f"{name}.{parameter}" for parameter in free_to_change(module, known=scheme is None)}
        before = {} if scheme else before_repacking(module)
        others = self._others(module, packed)
        self.unchanged |= {known for known, _ in others.values()}
        phases.enter(engine.REPACK)
        step()
        phases.enter(COMPARE)
        self.wrong += after_repacking(module, name, before)
        for parameter, (known, copy) in others.items():
            now = getattr(module, parameter, None)
            if now is None or now.dtype != copy.dtype or difference(now.detach(), copy):
                self.touched.add(known)

    def _others(self, module: nn.Module, packed: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
        """The other parameters and buffers of a module: by its name for each, the model's, and a copy."""
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        return {
            parameter: (self.names[tensor.data_ptr()], tensor.detach().clone())
            for parameter, tensor in own
            if tensor.data_ptr() in self.names and parameter not in packed
        }


def repack(
    loaded: Loaded,
    equal: Mapping[str, int],
    model: nn.Module,
    tensors: Callable[[], Mapping[str, Tensor]],
    reference: Callable[[], Iterable[tuple[str, Tensor]]],
    phases: PhaseLog,
) -> Repacking:
    """Repacks a model module by module, as its engine's loader does; all else must stay as it was.

    `equal`: the tensors that were right before. `tensors` gives what the model holds afterwards.
    """
    names = {tensor.data_ptr(): name for name, tensor in reversed([*loaded.tensors.items()]) if tensor.numel()}
    dead = list(loaded.dead_routers())
    seen = Repacking(loaded, names)
    for name, module in model.named_modules():
        seen.run(name, module, phases)
    after = replace(loaded, tensors=tensors())
    again = after.compare(reference(), seen.touched.__contains__) if seen.touched else Comparison()
    moved = [one for one in again.differing if one.tensor in equal]
    seen.unchecked += [f"{one.tensor}: its kernel has a layout of its own" for one in moved if one.param in seen.free]
    seen.wrong += [one for one in moved if one.param not in seen.free]
    seen.wrong += [one for one in after.dead_routers() if one not in dead]
    return seen
