"""Tensors that transformers' own class misses, does not know, or has in another shape. No value is read.

As a program, `python -m ckptkit.verify.witnesses.reference.names JOB.json`. The class is built on the meta device and
loads tensors of the stored names and shapes through transformers' own renaming, as `from_pretrained` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import modeling_utils

from ckptkit.converters.class_in_transformers import class_for, config_for, hub_offline, is_model
from ckptkit.core.errors import words_of
from ckptkit.core.printable import one_line
from ckptkit.core.specs import TensorSpec
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase, describe_error, is_verdict, run_job
from ckptkit.verify.witnesses.reference.job import NamesJob, NamesReport, OtherShape

BUILD = Phase("building the class in transformers", config_validators=("transformers", "huggingface_hub"))


def run(job: NamesJob, phases: ExitReport) -> NamesReport:
    """Loads names and shapes. transformers' message about a config that it refuses is `refused` in the report."""
    return answer(job, phases, BUILD, load_names)


def answer(job: NamesJob, phases: ExitReport, phase: Phase, load: Callable[[NamesJob], NamesReport]) -> NamesReport:
    """The result of `load`, or `refused` with a verdict of the code under test in this phase."""
    transformers.logging.set_verbosity_error()
    phases.enter(phase)
    try:
        return load(job)
    except Exception as error:
        # Errors about missing values are not about the checkpoint.
        if "meta" in words_of(error) or not is_verdict(error, phase):
            raise
        return NamesReport(refused=describe_error(error))


def load_names(job: NamesJob) -> NamesReport:
    """Loads names and shapes into the class. Raises exceptions of transformers about a config."""
    config = config_for(job.config)
    if config is None or (model_class := class_for(config)) is None:
        return NamesReport()
    report = _loaded(model_class, config, job.tensors)
    if 2 * len(report.missing) <= len(report.own):
        return report
    module = import_module(model_class.__module__)
    for other in (getattr(module, name) for name in module.__all__ if not name.endswith("PreTrainedModel")):
        if is_model(other) and other.config_class is type(config) and other is not model_class:
            found = _loaded(other, config, job.tensors)
            if found.own and not (found.missing or found.unexpected or found.other_shapes or found.errors):
                return replace(report, fits=other.__name__)
    return report


def _loaded(model_class: Any, config: Any, tensors: Sequence[TensorSpec]) -> NamesReport:
    weights = {one.name: torch.empty(one.shape, dtype=one.torch_dtype, device="meta") for one in tensors}
    loads: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> None:
        """Records transformers' `LoadStateDictInfo`, also if it then raises because it cannot convert tensors."""
        loads.extend(one for one in (*args, *kwargs.values()) if hasattr(one, "conversion_errors"))

    with (
        patch.object(modeling_utils, "log_state_dict_report", record),
        patch.object(torch, "equal", _equal),
        hub_offline(),
    ):
        model = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            device_map="meta",
            ignore_mismatched_sizes=True,
            attn_implementation="eager",
        )
    info, own = loads[-1], model.state_dict()
    shapes = [OtherShape(name, list(stored), list(built)) for name, stored, built in info.mismatched_keys]
    return NamesReport(
        model_class.__name__,
        sorted(set(info.missing_keys).difference(info.conversion_errors)),
        sorted(info.unexpected_keys),
        sorted(shapes, key=lambda one: one.name),
        {name: _exception_of(text) for name, text in sorted(info.conversion_errors.items())},
        own=sorted(own),
        integers=sorted(name for name, tensor in own.items() if not tensor.is_floating_point()),
        aliases=_aliases(model, weights),
    )


def _equal(one: torch.Tensor, other: torch.Tensor, equal: Callable[..., bool] = torch.equal) -> bool:
    """torch.equal, but False for weights on the meta device, so that tied weights that are both stored stay apart."""
    return not (one.is_meta or other.is_meta) and equal(one, other)


def _aliases(model: Any, stored: Mapping[str, object]) -> dict[str, list[str]]:
    """Missing weights that the class ties to several stored ones: the one used instead, and the others."""
    tied: dict[str, list[str]] = {}
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        tied.setdefault(other, [other]).append(one)
    aliases = {}
    for source, names in tied.items():
        if source in stored:
            continue
        by_id = {id(model.get_parameter_or_buffer(name)): name for name in names if name in stored}
        for name in names:
            if name not in stored and len(by_id) > 1 and (used := by_id.get(id(model.get_parameter_or_buffer(name)))):
                aliases[name] = [used, *(other for other in by_id.values() if other != used)]
    return aliases


def _exception_of(text: str) -> str:
    lines = text.strip().splitlines()
    messages = [line for line in lines if line and not line.startswith((" ", "Traceback", "Error"))]
    return one_line(messages[-1] if messages else text)


if __name__ == "__main__":
    run_job(NamesJob, run)
