"""Loads a model for an engine: poisons it, runs its own loading, compares the result, and repacks it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from logging.handlers import BufferingHandler

import torch
from torch import Tensor, nn

from ckptkit.core.printable import one_line
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.witnesses.loading.bits import difference, poison
from ckptkit.verify.witnesses.loading.compare import Loaded
from ckptkit.verify.witnesses.loading.engine import Engine, ModelBuild, Weights
from ckptkit.verify.witnesses.loading.job import LoadReport, Observation
from ckptkit.verify.witnesses.loading.layouts.layout import Layout, not_kept
from ckptkit.verify.witnesses.loading.names import draft_names
from ckptkit.verify.witnesses.loading.placement import Placement
from ckptkit.verify.witnesses.loading.trace import Trace
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase

COMPARE = Phase("comparing what was loaded")


def examine(
    engine: Engine,
    build: ModelBuild,
    phases: ExitReport,
    model: nn.Module,
    weights: Weights,
    device: torch.device,
    target: Loaded | None = None,
) -> Loaded:
    """Loads a built model, which may draft for `target`, and compares it. Raises as the engine does."""
    before = _tensors_of(model, target)
    poison(tensor for name, tensor in before.items() if not engine.FACTS.has_default(name))
    warnings = BufferingHandler(sys.maxsize)
    warnings.setLevel(logging.WARNING)
    logger = logging.getLogger(engine.FACTS.name)
    logger.addHandler(warnings)
    phases.enter(engine.LOAD)
    with Trace(before.values()) as trace:
        model.load_weights(trace.feed(_with_steps(weights, phases)))  # type: ignore[operator]
    logger.removeHandler(warnings)
    if target is not None:
        engine.share(target.model, model)
    phases.enter(COMPARE)
    lines = [record.getMessage() for record in warnings.buffer]
    first, emulated = next(model.parameters()), engine.emulated_device()
    cpu = f"cpu, with the choices of {emulated}" if emulated else "cpu"
    report = LoadReport(
        version=version(engine.FACTS.name),
        model=type(model).__name__,
        device=torch.cuda.get_device_name() if first.is_cuda else cpu,
        dtype=str(first.dtype).removeprefix("torch."),
        sizes=build.sizes,
        parameters=len({tensor.data_ptr() for tensor in before.values() if tensor.numel()}),
        log=tuple(one_line(line) for line in lines if "not found" in line),
    )
    tensors = _tensors_of(model, target)
    placement = Placement.of(trace, tensors)
    sizes = {name: block.numel for name, block in trace.given.items()}
    if target is not None:
        sizes = {name: sizes[name] for name in draft_names(build.config, sizes)}
    loaded = Loaded(engine, build, model, tensors, placement, sizes, report, target)
    names = loaded.compare()
    report.loaded_names = len(loaded.sizes)
    report.partial = {name: (loaded.sizes[name], loaded.parts(name)) for name in loaded.in_part}
    report.routers_seen = len(loaded.routers())
    report.unwritten = tuple(loaded.unwritten())
    report.dropped = tuple(loaded.dropped(names))
    report.routers = tuple(loaded.dead_routers())
    report.draft = tuple(draft_names(loaded.config, loaded.sizes))
    if device.type == "cuda":
        _repack(loaded, phases, target)
    return loaded


def _with_steps(weights: Weights, phases: ExitReport) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        phases.step = f"the last tensor it was given: {name}"
        yield name, tensor
    phases.step = "by then it had been given every tensor"


def _tensors_of(model: nn.Module, target: Loaded | None) -> dict[str, Tensor]:
    """The model's parameters and persistent buffers, without those that a draft model shares with its target."""
    shared = {tensor.data_ptr() for tensor in target.tensors.values()} if target else set()
    state = model.state_dict(keep_vars=True).items()
    return {name: tensor.detach() for name, tensor in state if tensor.data_ptr() not in shared}


def _repack(loaded: Loaded, phases: ExitReport, target: Loaded | None) -> None:
    """Repacks the model step by step, as its engine does. Parameters without a layout must not change."""
    engine, report = loaded.engine, loaded.report
    names = {tensor.data_ptr(): name for name, tensor in reversed([*loaded.tensors.items()]) if tensor.numel()}
    dead = list(loaded.dead_routers())
    wrong = list[Observation]()
    compared, changed, free = set[str](), set[str](), set[str]()  # parameters; `free`: may change in unknown ways

    @contextmanager
    def watch(name: str, module: nn.Module, layout: Layout | None) -> Iterator[None]:
        params, compare = (layout or not_kept(()))(module)
        unlisted = {  # parameters and buffers without a layout: the name in the model and a copy, by the name here
            parameter: (names[tensor.data_ptr()], tensor.detach().clone())
            for parameter, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if tensor.data_ptr() in names and parameter not in params
        }
        phases.enter(engine.REPACK)
        yield
        phases.enter(COMPARE)
        touched = {full for parameter, (full, copy) in unlisted.items() if _has_changed(module, parameter, copy)}
        unknown = ""
        try:
            for seen in compare():
                place = f"{name}.{seen.param}"
                if seen.change is None:
                    wrong.append(replace(seen, tensor=place, param=place))
                else:
                    report.requantized[place] = max(seen.change, report.requantized.get(place, 0.0))
        except CannotCheck as why:
            unknown = str(why)
        unlisted_names = {full for full, _ in unlisted.values()}
        compared.update(unlisted_names, (f"{name}.{parameter}" for parameter in params))
        changed.update(touched)
        if unknown and not params:
            free.update(unlisted_names)
        if unknown and (touched or params):
            report.unchecked += (f"{name}: {unknown}",)

    engine.run_after_loading(loaded.model, watch)
    after = replace(loaded, tensors=_tensors_of(loaded.model, target), report=replace(report, equal={}, differing=()))
    if changed:
        after.compare(changed.__contains__)
    wrong += [one for one in after.report.differing if one.tensor in report.equal and one.param not in free]
    wrong += [one for one in after.dead_routers() if one not in dead]
    report.repacked, report.repacked_seen = tuple(wrong), len(compared)


def _has_changed(module: nn.Module, parameter: str, copy: Tensor) -> bool:
    now = getattr(module, parameter, None)
    return now is None or now.dtype != copy.dtype or difference(now.detach(), copy) is not None
