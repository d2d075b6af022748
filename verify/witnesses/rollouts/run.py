"""Chooses parts of a recorded rollout and has transformers compute them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ckptkit.converters.config.values import language_part
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.expected import config_of
from ckptkit.verify.witnesses.reference.job import ReferenceJob
from ckptkit.verify.witnesses.reference.run import run_reference
from ckptkit.verify.witnesses.rollouts.recorded import RecordedSample, Recording, read_recording
from ckptkit.verify.witnesses.runner import START_S, ask

_SAMPLES, _TOKENS, _MAX_TOKENS, _PROMPTS = 16, 16384, 4096, 64  # at most; _MAX_TOKENS are those of one sample
# A part, and the log-probabilities of its response in transformers: in float32, and in the dtype of an engine.
Recomputed: TypeAlias = tuple[RecordedSample, Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class RolloutJob:
    home: Path
    samples: Sequence[RecordedSample]
    report: str = ""


@dataclass(frozen=True)
class Rendering:
    index: int
    different: str = ""  # "TOKEN (id) at token N, recorded TOKEN (id) after TEXT"; empty if all tokens are equal
    assumed: str = ""  # an option that the file does not record and that renders equal tokens
    refused: str = ""  # the template's own message


@dataclass(frozen=True)
class RenderedPrompts:
    renderings: Sequence[Rendering]


@once
def recording_of(subject: Subject) -> Recording:
    """The recording of `rollout_data`. Raises NotApplicable without one, CkptkitError as `read_recording`."""
    if subject.options.rollout_data is None:
        raise NotApplicable("--rollout-data was not given")
    return read_recording(subject.options.rollout_data)


def tokenizer_directory(subject: Subject) -> Path:
    return Path(getattr(subject.checkpoint, "hf_path", subject.path))


@once
def parts_of(subject: Subject) -> Sequence[RecordedSample]:
    """Evenly spaced samples, each up to 4096 tokens. Raises CannotCheck if none can be computed again."""
    recording, given = recording_of(subject), subject.options.rollout_temperature
    longest = min(_MAX_TOKENS, language_part(config_of(subject)).get("max_position_embeddings") or _MAX_TOKENS)
    found = [_part(one, int(longest), given) for one in recording.samples if not one.skip_reason]
    usable = [part for part in found if any(part.mask) and part.log_probs]
    if not usable:
        reasons = dict.fromkeys(filter(None, (one.skip_reason for one in recording.samples)))
        why = "; ".join(reasons) or f"none has recorded response tokens among its first {longest}"
        raise CannotCheck(f"transformers can compute no sample of {recording.path} again: {why}")
    spread = (_spread(usable, count) for count in range(_SAMPLES, 0, -1))
    return next(parts for parts in spread if sum(len(part.tokens) for part in parts) <= _TOKENS)


def _part(one: RecordedSample, longest: int, temperature: float | None) -> RecordedSample:
    # The first token of a sample has no log-probability.
    begin = len(one.prompt_tokens)
    tokens, first = one.tokens[:longest], max(begin, 1)
    inside = slice(first - begin, max(len(tokens), first) - begin)
    return replace(
        one,
        tokens=tokens,
        response=max(len(tokens) - first, 0),
        log_probs={side: values[inside] for side, values in one.log_probs.items()},
        mask=one.mask[inside],
        temperature=temperature or one.temperature,
    )


def _spread(every: Sequence[RecordedSample], most: int) -> Sequence[RecordedSample]:
    """At most `most` evenly spaced samples."""
    count = min(len(every), most)
    return [every[place * len(every) // count] for place in range(count)]


@once
def run_recompute(subject: Subject) -> tuple[str, Sequence[Recomputed]]:
    """The dtype of an engine, and the parts with their log-probabilities. Raises CannotCheck as `run_reference`."""
    parts = parts_of(subject)
    job = ReferenceJob(
        subject.path,
        prompts=[part.tokens for part in parts],
        top_ids=[[[token] for token in part.tokens[1:]] for part in parts],
        hf=subject.hf_path,
        temperatures=[part.temperature or 1.0 for part in parts],
    )
    found = run_reference(subject, job)
    rows = zip(parts, found.exact, found.rounded, strict=True)
    return found.dtype, [(one, e.tokens[-one.response :], r.tokens[-one.response :]) for one, e, r in rows]


@once
def recorded_prompts(subject: Subject) -> Sequence[RecordedSample]:
    """Samples with different recorded prompts, evenly spread over the file."""
    found: dict[str, RecordedSample] = {}
    for one in recording_of(subject).samples:
        if one.prompt is not None and one.prompt_tokens and not one.skip_reason:
            found.setdefault(repr((one.prompt, one.options, one.prompt_tokens)), one)
    return _spread(list(found.values()), _PROMPTS)


def run_templates(subject: Subject) -> Sequence[Rendering]:
    """The prompts as the checkpoint's own tokenizer renders them. Raises CannotCheck if it does not."""
    job = RolloutJob(tokenizer_directory(subject).absolute(), recorded_prompts(subject))
    answer = ask(job, "ckptkit.verify.witnesses.rollouts.process", RenderedPrompts, START_S)
    return answer.require("transformers could not render the prompts").renderings
