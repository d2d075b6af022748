"""Tensors of an adapter that PEFT loads into the class of its base, and those that it misses. No value is read.

As a program, `python -m ckptkit.verify.witnesses.reference.adapter JOB.json`. transformers builds the class on the meta
device, and PEFT adds the adapter of adapter_config.json to it and loads tensors of the stored names and shapes.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils.other import get_pattern_key
from transformers.models.auto import modeling_auto

from ckptkit.converters.class_in_transformers import class_for, config_for, hub_offline
from ckptkit.converters.lora_settings import APPLIED, FIELDS
from ckptkit.core.specs import TensorSpec
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase, run_job
from ckptkit.verify.witnesses.reference.job import NamesJob, NamesReport, OtherShape
from ckptkit.verify.witnesses.reference.names import answer

LOAD = Phase("loading the adapter in PEFT", code_under_test=("peft",))
# Fields in addition to those of a merge. PEFT gets no further ones: it would import modules and read files for them.
_FIELDS = ("bias", "fan_in_fan_out", "lora_dropout", "task_type")
_CLASSES = {
    "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
}
_HEAD = re.compile(r"(?:.+\.)?(?:score|classifier)\.weight")
_IN_MEMORY = re.compile(
    r"\.modules_to_save\.default|(?<=lora_magnitude_vector)(\.default)?\.weight$|\.default(?=(\.weight)?$)"
)


def run(job: NamesJob, phases: ExitReport) -> NamesReport:
    """Loads names and shapes. PEFT's exception is `refused` in the report; names are as PEFT saves them."""
    return answer(job, phases, LOAD, load_adapter)


def load_adapter(job: NamesJob) -> NamesReport:
    """Loads names and shapes into the class. Raises exceptions of transformers or PEFT about a config."""
    config, first = config_for(job.config), NamesReport()
    if config is None:
        return first
    fields = {key: value for key, value in job.adapter.items() if FIELDS.get(key) == APPLIED or key in _FIELDS}
    # The initialization of factors changes no name, and some kinds do not run on the meta device.
    (Path(job.report).parent / "adapter_config.json").write_text(json.dumps(fields | {"init_lora_weights": True}))
    for base_config, model_class in _classes(config, job.adapter.get("task_type"), job.tensors):
        report = _loaded(model_class, base_config, job)
        if not (report.missing or report.unexpected or report.other_shapes):
            fits = report.model_class if first.model_class else ""
            return replace(report, model_class=first.model_class or report.model_class, fits=fits)
        first = first if first.model_class else report
    return first


def _classes(config: Any, task: Any, tensors: Sequence[TensorSpec]) -> Iterator[tuple[Any, Any]]:
    """The configs and classes that may be the adapter's base: of its task, of the base, or of its language model."""
    if task in _CLASSES:
        rows = [one.shape[0] for one in tensors if _HEAD.fullmatch(one.name) and len(one.shape) == 2]
        config.num_labels = rows[0] if rows else config.num_labels
        if (task_class := _CLASSES[task].get(type(config), None)) is not None:
            yield config, task_class
            return
    if (base_class := class_for(config)) is not None:
        yield config, base_class
    text = config.get_text_config()
    text_class = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if text is not config and text_class not in (None, base_class):
        yield text, text_class


def _loaded(model_class: Any, config: Any, job: NamesJob) -> NamesReport:
    weights = {one.name: torch.empty(one.shape, dtype=one.torch_dtype, device="meta") for one in job.tensors}
    settings = peft.PeftConfig.from_pretrained(str(Path(job.report).parent))
    settings.inference_mode = False  # keeps trained parameters distinguishable
    with hub_offline(), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about the shapes and names compared here
        config._attn_implementation = "eager"
        model = peft.get_peft_model(model_class(config), settings, low_cpu_mem_usage=True)
        saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        # Without these PEFT stops at the first.
        absent = {name: one for name, one in saved.items() if ".lora_" not in name and name not in weights}
        result: Any = peft.set_peft_model_state_dict(
            model, weights | absent, ignore_mismatched_sizes=True, low_cpu_mem_usage=True
        )
    shapes = {name: (list(weights[name].shape), list(one.shape)) for name, one in saved.items() if name in weights}
    other = {name: both for name, both in shapes.items() if both[0] != both[1]}
    lost = {_IN_MEMORY.sub("", name) for name in result.missing_keys if ".lora_" in name}
    modules = [*model.base_model.targeted_module_names, *model.base_model.targeted_parameter_names]
    keys = [(field, key) for field in ("rank_pattern", "alpha_pattern") for key in job.adapter.get(field) or {}]
    unmatched = [one for one in keys if not any(get_pattern_key([one[1]], name) == one[1] for name in modules)]
    return NamesReport(
        model_class.__name__,
        sorted(lost.union(absent).difference(other)),
        sorted(_IN_MEMORY.sub("", name) for name in result.unexpected_keys),
        [OtherShape(name, *both) for name, both in sorted(other.items())],
        unmatched=[f"{field} {key!r}" for field, key in unmatched],
    )


if __name__ == "__main__":
    run_job(NamesJob, run)
