"""Starts the reference in a process of its own: what transformers makes of a checkpoint."""

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
from ckptkit.verify.witnesses.process.memory import free_memory, memory_limit
from ckptkit.verify.witnesses.reference.job import Ids, Reference, ReferenceJob
from ckptkit.verify.witnesses.reference.prediction import texts_of, tokenizer_of
from ckptkit.verify.witnesses.runner import ask, time_limit

_WITNESS = "ckptkit.verify.witnesses.reference.process"
_PASSES = 8  # over the weights, at most
_OPERATIONS_A_SECOND = 2e10  # slower than any processor worth waiting for
_SHORT, _LONG = 48, 4096  # tokens of a prompt
_SHORT_PROMPTS = 8
_WITH_ROOM = 1.2  # of a model's size: activations and what loading needs


def run_reference(subject: Subject, job: ReferenceJob) -> Reference:
    """What transformers makes of a job. Raises CannotCheck where it cannot say."""
    specs = subject.checkpoint.specs
    operations = 2 * sum(spec.nbytes for spec in specs.values()) * sum(map(len, job.prompts))
    limit_s = time_limit(specs, _PASSES) + operations / _OPERATIONS_A_SECOND
    return ask(job, _WITNESS, Reference, limit_s).require("transformers gave no reference")


@once
def run_prediction(subject: Subject) -> Reference:
    """What transformers alone makes of fixed texts, in float32 where that fits into memory.

    Raises CannotCheck where it cannot say, also because memory does not hold the model.
    """
    config = config_of(subject)
    home = Path(getattr(subject.checkpoint, "hf_path", subject.path))
    texts = texts_of(tokenizer_of(home), config)
    check_reference(subject, texts)
    numbers = sum(map(math.prod, expected_hf(config).values()))
    # What is dequantized or comes from Megatron is in memory twice while it is loaded.
    twice = 2 if subject.is_megatron or is_quantized(config) else 0
    free = free_memory()
    sizes = {dtype: int(_WITH_ROOM * (width + twice) * numbers) for dtype, width in (("float32", 4), (None, 2))}
    fitting = [dtype for dtype, size in sizes.items() if not free or size <= memory_limit(free)]
    if not fitting:
        raise CannotCheck(
            f"transformers needs {size(sizes[None])} of memory for this model and {size(free)} are "
            "free: run it on a larger machine, or an engine on GPUs (--engine --logits)"
        )
    return run_reference(subject, ReferenceJob(subject.path, texts=texts, hf=subject.hf_path, dtype=fitting[0]))


def check_reference(subject: Subject, prompts: Ids) -> None:
    """Raises CannotCheck where transformers is known to compute another model for prompts."""
    config = config_of(subject)
    why = transformers_deviation(config, max(map(len, prompts)))
    if why:
        raise CannotCheck(f"transformers is not a reference for this model: {why}")


def judged_by_transformers(subject: Subject, prompts: Ids, top_ids: Sequence[Ids]) -> Reference:
    """What transformers makes of prompts with the source's weights, or without an HF source with the subject's own.

    Raises CannotCheck.
    """
    path = subject.source_path if subject.source_path and subject.source_is_hf else subject.path
    return run_reference(subject, ReferenceJob(path, prompts=prompts, top_ids=top_ids, hf=subject.hf_path))


def prompts_of(config: Mapping[str, Any], with_long: bool) -> list[list[int]]:
    """Fixed tokens, the same in every run: short prompts and, `with_long`, one of 4096 tokens or all the model takes.

    Tokens that the config names (end, padding, images) are left out. Raises CkptkitError without a vocabulary size.
    """
    text = language_part(config)
    if not isinstance(vocabulary := text.get("vocab_size"), int):
        raise CkptkitError("config.json has no vocab_size", "take it from the release")
    special = {one for part in (config, text) for key, value in part.items() if "token" in key for one in _ids(value)}
    choice = [token for token in range(vocabulary) if token not in special]
    longest = min(_LONG, int(text.get("max_position_embeddings") or _LONG) - 8)
    lengths = [min(_SHORT, longest)] * _SHORT_PROMPTS + [longest] * with_long
    source = random.Random(0)
    return [source.choices(choice, k=length) for length in lengths]


def _ids(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]
