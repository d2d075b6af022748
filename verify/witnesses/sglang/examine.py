"""What the witness runs instead of SGLang's loading: poison, the model's own `load_weights`, comparison, repacking."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from ckptkit.core.printable import one_line
from verify.witnesses.bits import difference, poison
from verify.witnesses.ending import PhaseLog
from verify.witnesses.sglang.compare import Comparison, Loaded
from verify.witnesses.sglang.draft import DraftLoaded, share, without_shared
from verify.witnesses.sglang.job import ONE_RANK, EngineSizes, Held, Observation, SglangReport
from verify.witnesses.sglang.load import COMPARE, LOAD, REPACK, Weights
from verify.witnesses.sglang.marlin import (
    after_repacking,
    before_repacking,
    free_to_change,
    other_layout,
    repacked_parameters,
)
from verify.witnesses.sglang.names import draft_names, has_default
from verify.witnesses.sglang.placement import Placement
from verify.witnesses.sglang.trace import Trace


class _NotFound(logging.Handler):
    """Keeps what SGLang's loaders say of names that they do not know."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the message when it says that something was not found."""
        if "not found" in record.getMessage():
            self.lines.append(one_line(record.getMessage()))


@dataclass
class Examination:
    """One load and what it showed; SGLang's loader calls it with the model, the weights and the device.

    `reference` gives every tensor that must be in the model, at each call anew; `alter` changes the weights. `target`:
    the model that this one drafts for, and what was seen of it.
    """

    config: Mapping[str, Any]
    fused_shared: bool
    reference: Callable[[], Iterable[tuple[str, Tensor]]]
    alter: Callable[[Weights], Weights]
    phases: PhaseLog
    sizes: EngineSizes = ONE_RANK
    target: tuple[torch.nn.Module, Loaded] | None = None
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

    def __call__(self, model: torch.nn.Module, weights: Weights, device: torch.device) -> None:
        before = self._tensors(model)
        self.parameters = len({tensor.data_ptr() for tensor in before.values() if tensor.numel()})
        poison(tensor for name, tensor in before.items() if not has_default(name))
        handler = _NotFound()
        logging.getLogger("sglang").addHandler(handler)
        self.phases.enter(LOAD)
        with Trace(before.values()) as trace:
            model.load_weights(trace.feed(self._told(self.alter(weights))))  # type: ignore[operator]
        logging.getLogger("sglang").removeHandler(handler)
        if self.target is not None:
            share(self.target[0], model)
        self.phases.enter(COMPARE)
        self.log = tuple(handler.lines)
        self.loaded = self._loaded(trace, self._tensors(model))
        self._examine(self.loaded)
        if device.type == "cuda":
            self._repack(model)

    def _told(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            self.phases.step(f"the last tensor it was given: {name}")
            yield name, tensor
        self.phases.step("by then it had been given every tensor")

    def _loaded(self, trace: Trace, tensors: Mapping[str, Tensor]) -> Loaded:
        sizes = {name: block.numel for name, block in trace.given.items()}
        placement = Placement.of(trace, tensors)
        if self.target is None:
            return Loaded(self.config, tensors, placement, sizes, self.sizes.tp)
        own = {name: sizes[name] for name in draft_names(self.config, sizes)}
        return DraftLoaded(self.config, tensors, placement, own, self.sizes.tp, self.target[1])

    def _tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        found = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        return found if self.target is None else without_shared(found, self.target[1].tensors)

    def _examine(self, loaded: Loaded) -> None:
        names: list[str] = []
        self.comparison = loaded.compare(_noted(self.reference(), names))
        equal = self.comparison.equal
        self.unwritten = tuple(loaded.unwritten(equal))
        self.dropped = tuple(loaded.dropped(equal, names))
        self.routers = tuple(loaded.dead_routers())

    def _repack(self, model: torch.nn.Module) -> None:
        """Runs the quantization methods module by module, as SGLang's loader does; all else must stay as it was."""
        names = {tensor.data_ptr(): name for name, tensor in reversed([*self.loaded.tensors.items()]) if tensor.numel()}
        troubles: list[Observation] = []
        repacked: set[str] = set()
        kept: set[str] = set()
        touched: set[str] = set()
        free: set[str] = set()
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is None:
                continue
            if scheme := other_layout(module):
                self.unchecked += (f"{name}: {scheme} has a layout of its own",)
            repacked |= {f"{name}.{parameter}" for parameter in repacked_parameters(module)}
            free |= {f"{name}.{parameter}" for parameter in free_to_change(module)}
            before = before_repacking(module)
            others = {
                parameter: (names[tensor.data_ptr()], tensor.detach().clone())
                for parameter, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                if tensor.data_ptr() in names and parameter not in repacked_parameters(module)
            }
            kept |= {known for known, _ in others.values()}
            self.phases.enter(REPACK)
            method.process_weights_after_loading(module)
            self.phases.enter(COMPARE)
            troubles += after_repacking(module, name, before)
            for parameter, (known, copy) in others.items():
                now = getattr(module, parameter, None)
                if now is None or now.dtype != copy.dtype or difference(now.detach(), copy):
                    touched.add(known)
        after = replace(self.loaded, tensors=self._tensors(model))
        again = after.compare(self.reference(), touched.__contains__) if touched else Comparison()
        moved = [trouble for trouble in again.differing if trouble.tensor in self.comparison.equal]
        self.unchecked += tuple(
            f"{trouble.tensor}: its kernel has a layout of its own" for trouble in moved if trouble.param in free
        )
        troubles += [trouble for trouble in moved if trouble.param not in free]
        troubles += [trouble for trouble in after.dead_routers() if trouble not in self.routers]
        self.repacked = tuple(troubles)
        self.repacked_seen = len(repacked | kept)

    def _held(self, name: str) -> Held:
        parts = self.loaded.placement.parts(name)
        return Held(self.loaded.sizes[name], [(part.offset, part.sizes, part.strides) for part in parts])

    def report(self, model: torch.nn.Module) -> SglangReport:
        """Everything that was seen; `model` as it is after loading."""
        first = next(model.parameters())
        return SglangReport(
            version=version("sglang"),
            model=type(model).__name__,
            device=torch.cuda.get_device_name() if first.is_cuda else "cpu",
            dtype=str(first.dtype).removeprefix("torch."),
            sizes=self.sizes,
            fused_shared=self.fused_shared,
            parameters=self.parameters,
            fed=len(self.loaded.sizes),
            equal=self.comparison.equal,
            held={name: self._held(name) for name in self.loaded.in_part},
            routers_seen=len(self.loaded.routers()),
            unwritten=self.unwritten,
            dropped=self.dropped,
            differing=tuple(self.comparison.differing),
            rounded=tuple(self.comparison.rounded),
            computed=tuple(self.loaded.placement.computed),
            routers=self.routers,
            draft=tuple(draft_names(self.config, self.loaded.sizes)),
            log=self.log,
            repacked=self.repacked,
            repacked_seen=self.repacked_seen,
            unchecked=self.unchecked,
        )


def _noted(pairs: Iterable[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in pairs:
        names.append(name)
        yield name, tensor
