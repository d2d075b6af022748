"""Which tensors transformers' own class misses, does not know, or has in another shape. No value is read.

As a program, `python -m verify.witnesses.reference.names JOB.json`. The class is built on the meta device and loads
tensors of the stored names and shapes through transformers' own renaming, as `from_pretrained` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import modeling_utils

from ckptkit.core.errors import words_of
from ckptkit.core.printable import one_line
from quant.selection.meta_model import hub_offline
from verify.witnesses.process.exit_report import Phase, PhaseLog, described, is_verdict, run_job
from verify.witnesses.reference.job import NamesJob, NamesReport, OtherShape

BUILD = Phase("building the class in transformers", deciders=("transformers", "huggingface_hub"))


def run(job: NamesJob, phases: PhaseLog) -> NamesReport:
    """Loads names and shapes. What transformers says of a config that it refuses is `refused` in the report."""
    transformers.logging.set_verbosity_error()
    phases.enter(BUILD)
    try:
        return load_names(job)
    except Exception as error:  # what a class says of its config in words of its own is its verdict
        # What it cannot do without values says nothing about the checkpoint.
        if "meta" in words_of(error) or not is_verdict(error, BUILD):
            raise
        return NamesReport(refused=described(error))


def load_names(job: NamesJob) -> NamesReport:
    """Loads names and shapes into the class. Raises what transformers raises about a config."""
    home = Path(job.report).parent / "config"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(_without_code(job.config)))
    if job.config["model_type"] not in transformers.CONFIG_MAPPING:
        return NamesReport()
    config = transformers.AutoConfig.from_pretrained(home, trust_remote_code=False)
    if (model_class := _class_of(config)) is None:
        return NamesReport()
    weights = {one.name: torch.empty(one.shape, dtype=one.torch_dtype, device="meta") for one in job.tensors}
    with _recorded() as loads, hub_offline():
        model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            device_map="meta",
            ignore_mismatched_sizes=True,
            attn_implementation="eager",
        )
    info = loads[-1]
    shapes = [OtherShape(name, list(stored), list(built)) for name, stored, built in info.mismatched_keys]
    return NamesReport(
        model_class.__name__,
        sorted(set(info.missing_keys).difference(info.conversion_errors)),
        sorted(info.unexpected_keys),
        sorted(shapes, key=lambda one: one.name),
        {name: _last_words(text) for name, text in sorted(info.conversion_errors.items())},
    )


def _without_code(config: Any) -> Any:
    """A part of a config without the keys that name code: classes of a repository, or implementations from a hub."""
    if isinstance(config, list):
        return [_without_code(one) for one in config]
    if not isinstance(config, dict):
        return config
    return {
        key: _without_code(value)
        for key, value in config.items()
        if key != "auto_map" and not key.endswith("implementation")
    }


@contextmanager
def _recorded() -> Iterator[list[Any]]:
    """What transformers would log of each load and, where it cannot convert tensors, end with.

    `modeling_utils.log_state_dict_report` of transformers 5 gets it as `utils.loading_report.LoadStateDictInfo`.
    """
    loads: list[Any] = []

    def record(*given: Any, **named: Any) -> None:
        loads.extend(one for one in (*given, *named.values()) if hasattr(one, "conversion_errors"))

    with patch.object(modeling_utils, "log_state_dict_report", record):
        yield loads


def _last_words(text: str) -> str:
    """The exception in what transformers recorded of a conversion, without its traceback."""
    lines = text.strip().splitlines()
    said = [line for line in lines if line and not line.startswith((" ", "Traceback", "Error"))]
    return one_line(said[-1] if said else text)


def _class_of(config: Any) -> Any | None:
    """transformers' class that `architectures` names first, or that of a causal model; None: it has neither."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not config.architectures:
        return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config))
    found = getattr(transformers, str(config.architectures[0]), None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


if __name__ == "__main__":
    run_job(NamesJob, run)
