"""Runs transformers in a separate process as the reference for a checkpoint."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptkit.converters.config.values import language_part
from ckptkit.converters.planner import expected_hf
from ckptkit.core.errors import CkptkitError
from ckptkit.core.progress import size
from ckptkit.quant.engines.transformers_class import transformers_deviation
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.expected import config_of, is_quantized
from ckptkit.verify.witnesses.process.sandbox import free_memory, memory_limit
from ckptkit.verify.witnesses.reference.job import Ids, Reference, ReferenceJob
from ckptkit.verify.witnesses.reference.prediction import texts_of, tokenizer_of
from ckptkit.verify.witnesses.runner import ask, time_limit

_WITNESS = "ckptkit.verify.witnesses.reference.process"
_PASSES = 8  # over the weights, at most
_OPERATIONS_A_SECOND = 2e10  # slower than any usable processor
_SHORT, _LONG = 48, 4096  # tokens of a prompt
_SHORT_PROMPTS = 8
_WITH_ROOM = 1.2  # of a model's size, for activations and loading


def run_reference(subject: Subject, job: ReferenceJob) -> Reference:
    """transformers' answer to a job. Raises CannotCheck if it gives none."""
    specs = subject.checkpoint.specs
    operations = 2 * sum(spec.nbytes for spec in specs.values()) * sum(map(len, job.prompts))
    limit_s = time_limit(specs, _PASSES) + operations / _OPERATIONS_A_SECOND
    return ask(job, _WITNESS, Reference, limit_s).require("transformers computed no reference")


@once
def run_prediction(subject: Subject) -> Reference:
    """transformers' prediction of fixed texts, in float32 if that fits. Raises CannotCheck if it gives none."""
    config = config_of(subject)
    home = Path(getattr(subject.checkpoint, "hf_path", subject.path))
    texts = texts_of(tokenizer_of(home), config)
    check_reference(subject, texts)
    numbers = sum(map(math.prod, expected_hf(config).values()))
    # Tensors that are dequantized or converted from Megatron are in memory twice while they are loaded.
    twice = 2 if subject.kind == "megatron" or is_quantized(config) else 0
    free = free_memory()
    sizes = {dtype: int(_WITH_ROOM * (width + twice) * numbers) for dtype, width in (("float32", 4), (None, 2))}
    fitting = [dtype for dtype, size in sizes.items() if not free or size <= memory_limit(free)]
    if not fitting:
        lack = f"transformers needs {size(sizes[None])} of memory for this model, but {size(free)} are free"
        raise CannotCheck(f"{lack}: use a larger machine, or an engine on GPUs (--engine --logits)")
    return run_reference(subject, ReferenceJob(subject.path, texts=texts, hf=subject.hf_path, dtype=fitting[0]))


def check_reference(subject: Subject, prompts: Ids) -> None:
    """Raises CannotCheck if transformers is known to compute another model for prompts."""
    if reason := transformers_deviation(config_of(subject), max(map(len, prompts))):
        raise CannotCheck(f"transformers cannot be the reference for this model: {reason}")


def judged_by_transformers(subject: Subject, prompts: Ids, top_ids: Sequence[Ids]) -> Reference:
    """transformers' answers with the HF source's weights, otherwise the subject's own. Raises CannotCheck."""
    path = subject.source_path if subject.source_path and subject.source_is_hf else subject.path
    return run_reference(subject, ReferenceJob(path, prompts=prompts, top_ids=top_ids, hf=subject.hf_path))


def prompts_of(config: Mapping[str, Any], with_long: bool) -> list[list[int]]:
    """The same random tokens in every run, without special ones. Raises CkptkitError without a vocabulary size."""
    text = language_part(config)
    if not isinstance(vocabulary := text.get("vocab_size"), int):
        raise CkptkitError("config.json has no vocab_size", "take it from the release")
    entries = [value for part in (config, text) for key, value in part.items() if "token" in key]
    special = [one for value in entries for one in (value if isinstance(value, list) else [value])]
    special_ids = {one for one in special if isinstance(one, int)}
    choice = [token for token in range(vocabulary) if token not in special_ids]
    longest = min(_LONG, int(text.get("max_position_embeddings") or _LONG) - 8)
    lengths = [min(_SHORT, longest)] * _SHORT_PROMPTS + [longest] * with_long
    source = random.Random(0)
    return [source.choices(choice, k=length) for length in lengths]
