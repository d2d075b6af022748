"""Chooses what of a recorded rollout is computed again, and starts the process that does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from converters.config.values import language_part
from verify.evidence.expected import config_of
from verify.evidence.subject import Subject
from verify.skip import Skip, Unable
from verify.witnesses.process.run import ask, time_limit
from verify.witnesses.rollouts.recorded import RecordedSample, Recording, read_recording

_SAMPLES, _TOKENS, _MAX_TOKENS = 16, 16384, 4096  # at most: samples, tokens of all together, tokens of one
_PROMPTS = 64
_START_S, _PASSES = 1200, 8  # importing transformers; over the weights, at most
_FLOPS = 2e10  # a second, slower than any processor worth waiting for
_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """The beginning of a recorded sample."""

    index: int  # of the sample in its file
    tokens: Sequence[int]
    first: int  # from here on they are of the response
    temperature: float
    recorded: Mapping[str, Sequence[float]]  # log-probabilities of the response's tokens, by side
    mask: Sequence[bool]  # whether the model wrote each of them


@dataclass(frozen=True)
class Prompt:
    """A recorded prompt."""

    index: int
    prompt: str | Sequence[Mapping[str, Any]]  # text or messages
    options: Mapping[str, Any]  # of the chat template
    tokens: Sequence[int]  # as recorded


@dataclass(frozen=True)
class RolloutJob:
    """Prompts to render with a checkpoint's tokenizer or, without any, parts to compute log-probabilities of."""

    checkpoint: str  # HF or Megatron; of prompts the HF directory that has the tokenizer
    hf: str | None = None  # gives the config of a Megatron checkpoint that has none
    parts: Sequence[Part] = ()
    prompts: Sequence[Prompt] = ()
    report: str = ""


@dataclass(frozen=True)
class Rendering:
    """A prompt as the tokenizer renders it, compared with its recorded tokens."""

    index: int
    different: str = ""  # "TOKEN (id) at token N, recorded TOKEN (id) after TEXT"; empty if all tokens are equal
    assumed: str = ""  # the option that the file does not record and that gives equal tokens
    refused: str = ""  # the template's own message


@dataclass(frozen=True)
class Recomputed:
    """Log-probabilities of each part's response tokens, in nats; or the prompts of the job."""

    dtype: str = ""  # the engine's
    exact: Sequence[Sequence[float]] = ()  # in float32
    rounded: Sequence[Sequence[float]] = ()  # in `dtype`
    renderings: Sequence[Rendering] = ()


def recording_of(subject: Subject) -> Recording:
    """The recording in the subject's `rollout_data`. Raises Skip without one, CkptkitError as `read_recording`."""
    if subject.options.rollout_data is None:
        raise Skip("--rollout-data was not given")
    return read_recording(subject.options.rollout_data)


def home_of(subject: Subject) -> Path:
    """The HF directory that has the subject's config and tokenizer."""
    found: Path = getattr(subject.checkpoint, "hf_path", subject.path)
    return found


def parts_of(subject: Subject) -> Sequence[Part]:
    """The parts to compute again: samples evenly spread over the file, of each as much as fits into 4096 tokens.

    Raises Unable where no sample has log-probabilities that can be computed again.
    """
    recording = subject.once(recording_of)
    text = language_part(config_of(subject))
    longest = min(_MAX_TOKENS, int(text.get("max_position_embeddings") or _MAX_TOKENS))
    found = [_part(one, longest, subject.options.rollout_temperature) for one in recording.samples]
    usable = [part for part in found if any(part.mask) and part.recorded]
    if not usable:
        reasons = dict.fromkeys(filter(None, (one.skip_reason for one in recording.samples)))
        why = "; ".join(reasons) or f"none has written and recorded tokens among its first {longest}"
        raise Unable(f"no sample of {recording.path} can be computed again: {why}")
    spread = (_spread(usable, count) for count in range(min(len(usable), _SAMPLES), 0, -1))
    return next(parts for parts in spread if sum(len(part.tokens) for part in parts) <= _TOKENS)


def _part(sample: RecordedSample, longest: int, temperature: float | None) -> Part:
    """Empty for a sample whose log-probabilities cannot be computed from its tokens."""
    # The first token of all has no log-probability: no token is before it.
    begin = len(sample.tokens) - sample.response
    first = max(begin, 1)
    tokens = sample.tokens[:longest]
    inside = slice(first - begin, max(len(tokens) - begin, first - begin))
    recorded = {} if sample.skip_reason else {side: values[inside] for side, values in sample.log_probs.items()}
    mask = list(sample.mask[inside])
    return Part(sample.index, tokens, first, temperature or sample.temperature or 1.0, recorded, mask)


def _spread(every: Sequence[_T], most: int) -> Sequence[_T]:
    """Evenly spaced ones, `most` at most."""
    count = min(len(every), most)
    return [every[place * len(every) // count] for place in range(count)]


def run_recompute(subject: Subject) -> tuple[Sequence[Part], Recomputed]:
    """The parts and their log-probabilities in transformers. Raises Unable where it gives none."""
    parts = subject.once(parts_of)
    parameters = sum(spec.nbytes for spec in subject.checkpoint.specs.values()) / 2
    more_s = 2 * 2 * parameters * sum(len(part.tokens) for part in parts) / _FLOPS
    hf = str(subject.hf_path.absolute()) if subject.hf_path else None
    limit_s = time_limit(_START_S, subject.checkpoint.specs, _PASSES) + more_s
    job = RolloutJob(str(subject.path.absolute()), hf, parts)
    return parts, _ask(job, limit_s, "transformers gave no reference")


def prompts_of(subject: Subject) -> Sequence[Prompt]:
    """Different recorded prompts, evenly spread over the file. Empty where it has none."""
    found: dict[str, Prompt] = {}
    for one in subject.once(recording_of).samples:
        if one.prompt is not None and one.prompt_tokens and not one.skip_reason:
            prompt = Prompt(one.index, one.prompt, one.options or {}, one.prompt_tokens)
            found.setdefault(repr((one.prompt, one.options, one.prompt_tokens)), prompt)
    return _spread(list(found.values()), _PROMPTS)


def run_templates(subject: Subject) -> Sequence[Rendering]:
    """The prompts as the checkpoint's own tokenizer renders them. Raises Unable where it gives none."""
    job = RolloutJob(str(home_of(subject).absolute()), prompts=subject.once(prompts_of))
    return _ask(job, time_limit(_START_S, {}, _PASSES), "prompts could not be rendered").renderings


def _ask(job: RolloutJob, limit_s: float, problem: str) -> Recomputed:
    found, failed = ask(job, "verify.witnesses.rollouts.process", Recomputed, limit_s)
    if failed or found is None:
        raise Unable(f"{problem}, which says nothing about the checkpoint: {failed}")
    return found
