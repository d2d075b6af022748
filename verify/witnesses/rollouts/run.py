"""Chooses what of a recorded rollout is computed again, and starts the processes that do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from converters.config.values import language_part
from verify.evidence.expected import config_of
from verify.evidence.subject import Subject
from verify.skip import Skip, Unable
from verify.witnesses.loading.run import interpreter_of, require
from verify.witnesses.process.interpreter import Interpreter
from verify.witnesses.process.run import ask, time_limit
from verify.witnesses.rollouts.job import (
    Part,
    Prompt,
    PromptJob,
    Recomputed,
    RecomputeJob,
    Rendering,
    Renderings,
)
from verify.witnesses.rollouts.recorded import RecordedSample, Recording, read_recording
from verify.witnesses.sglang.facts import SGLANG

_SAMPLES, _TOKENS, _MAX_TOKENS = 16, 16384, 4096  # at most: samples, tokens of all together, tokens of one
_PROMPTS = 64
_START_S, _PASSES = 1200, 8  # importing transformers or SGLang; over the weights, at most
_RECOMPUTE = "verify.witnesses.rollouts.recompute"
_FLOPS = 2e10  # a second, slower than any processor worth waiting for


def recording_of(subject: Subject) -> Recording:
    """What the subject's `rollout_data` holds. Raises Skip where it has none, CkptkitError as `read_recording`."""
    if subject.options.rollout_data is None:
        raise Skip("--rollout-data was not given")
    return read_recording(subject.options.rollout_data)


def home_of(subject: Subject) -> Path:
    """The HF directory that has the subject's config and tokenizer."""
    found: Path = getattr(subject.checkpoint, "hf_path", subject.path)
    return found


def parts_of(subject: Subject) -> Sequence[Part]:
    """What is computed again: samples evenly spread over the file, of each as much as fits into 4096 tokens.

    Raises Unable where no sample has log-probabilities that can be computed again.
    """
    recording = subject.once(recording_of)
    config = config_of(subject)
    text = language_part(config)
    longest = min(_MAX_TOKENS, int(text.get("max_position_embeddings") or _MAX_TOKENS))
    found = [_part(one, longest, subject.options.rollout_temperature) for one in recording.samples]
    usable = [part for part in found if any(part.mask) and part.recorded]
    if not usable:
        reasons = dict.fromkeys(filter(None, (one.skip_reason for one in recording.samples)))
        why = "; ".join(reasons) or f"none has written and recorded tokens among its first {longest}"
        raise Unable(f"no sample of {recording.path} can be computed again: {why}")
    return next(parts for parts in _spread(usable) if sum(len(part.tokens) for part in parts) <= _TOKENS)


def _part(sample: RecordedSample, longest: int, temperature: float | None) -> Part:
    """Empty for a sample whose log-probabilities cannot be computed from its tokens."""
    # The first token of all has no log-probability: nothing stands before it.
    begin = len(sample.tokens) - sample.response
    first = max(begin, 1)
    tokens = sample.tokens[:longest]
    inside = slice(first - begin, max(len(tokens) - begin, first - begin))
    recorded = {} if sample.skip_reason else {side: values[inside] for side, values in sample.log_probs.items()}
    mask = list(sample.mask[inside])
    return Part(sample.index, tokens, first, temperature or sample.temperature or 1.0, recorded, mask)


def _spread(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Evenly spaced ones: as many as may be, then fewer and fewer."""
    for count in range(min(len(parts), _SAMPLES), 0, -1):
        yield [parts[place * len(parts) // count] for place in range(count)]


def run_recompute(subject: Subject) -> tuple[Sequence[Part], Recomputed]:
    """What transformers makes of the parts. Raises Unable where it cannot say."""
    parts = subject.once(parts_of)
    parameters = sum(spec.nbytes for spec in subject.checkpoint.specs.values()) / 2
    more_s = 2 * 2 * parameters * sum(len(part.tokens) for part in parts) / _FLOPS
    hf = str(subject.hf_path.absolute()) if subject.hf_path else None
    limit_s = time_limit(_START_S, subject.checkpoint.specs, _PASSES) + more_s
    found, failed = ask(RecomputeJob(str(subject.path.absolute()), hf, parts), _RECOMPUTE, Recomputed, limit_s)
    if failed or found is None:
        raise Unable(f"transformers gave no reference, which says nothing about the checkpoint: {failed}")
    return parts, found


def prompts_of(subject: Subject) -> Sequence[Prompt]:
    """Different recorded prompts, evenly spread over the file. Empty where it has none."""
    found: dict[str, Prompt] = {}
    for one in subject.once(recording_of).samples:
        if one.prompt is not None and one.prompt_tokens and not one.skip_reason:
            prompt = Prompt(one.index, one.prompt, one.options or {}, one.prompt_tokens)
            found.setdefault(repr((one.prompt, one.options, one.prompt_tokens)), prompt)
    every = list(found.values())
    count = min(len(every), _PROMPTS)
    return [every[place * len(every) // count] for place in range(count)]


def run_templates(subject: Subject) -> Sequence[Rendering]:
    """What the checkpoint's own tokenizer makes of the prompts. Raises Unable where it cannot say."""
    return _render(subject, "verify.witnesses.rollouts.template", subject.once(prompts_of), Interpreter())


def run_sglang_templates(subject: Subject) -> Sequence[Rendering]:
    """What SGLang's chat endpoint makes of those that are messages. Raises Unable where it cannot say."""
    messages = [one for one in subject.once(prompts_of) if not isinstance(one.prompt, str)]
    if messages:
        require(SGLANG, subject)
    module, interpreter = "verify.witnesses.rollouts.sglang_template", interpreter_of(SGLANG, subject)
    return _render(subject, module, messages, interpreter) if messages else []


def _render(subject: Subject, module: str, prompts: Sequence[Prompt], interpreter: Interpreter) -> Sequence[Rendering]:
    job = PromptJob(str(home_of(subject).absolute()), prompts)
    limit_s = time_limit(_START_S, subject.checkpoint.specs, _PASSES)
    found, failed = ask(job, module, Renderings, limit_s, interpreter)
    if failed or found is None:
        raise Unable(f"prompts could not be rendered, which says nothing about the checkpoint: {failed}")
    return found.found
