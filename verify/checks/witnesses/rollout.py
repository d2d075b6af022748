"""What a training job recorded of a rollout, held against the checkpoint that it should have been made with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckptkit.formats.hf.reader import read_config
from ckptkit.formats.hf.side_files import quantization_of
from converters.config.values import language_part
from verify.check import Tally, Unable, check
from verify.checks.witnesses.engine import FURTHEST
from verify.evidence.expected import config_of
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.report import Severity
from verify.witnesses.reference.activations import rounds_activations
from verify.witnesses.rollouts.gap import Gap, gap, mean, neighbours
from verify.witnesses.rollouts.job import BestTemperature, Part, Recomputed
from verify.witnesses.rollouts.recorded import SIDES, RecordedSample, Recording
from verify.witnesses.rollouts.run import home_of, recording_of, run_recompute

FURTHEST_SAMPLE = 10.0  # times the noise, of one sample's mean: a few tokens scatter more than many
_LEAST_NOISE = 1e-4  # nats a token
_ABOVE_ZERO = 1e-3  # nats that rounding may put the log-probability of a certain token above 0
_FEW, _SHORT = 32, 8  # tokens of all samples, and of one, below which a mean says little
_SAME_TEMPERATURE = 0.03  # relative: nobody sets another one as near, and a small gap of any kind may look so
_JITTER, _CONFIGURATION = 1e-4, 1.0  # KL, by miles' debugging guide (docs/developer/debug.md)
_OFF_TEMPLATE = -0.8  # nats a token, of an instruct model's own answers, by slime's and miles' guides


def needs_rollout(subject: Subject) -> str | None:
    """For checks of a recorded rollout."""
    return None if subject.options.rollout_data else "no --rollout-data was given"


@dataclass(frozen=True)
class _Side:
    """One side's log-probabilities and transformers' for the same tokens, in float32 and in `dtype`."""

    name: str
    parts: Sequence[Part]
    exact: Sequence[Sequence[float]]
    rounded: Sequence[Sequence[float]]
    dtype: str
    best: BestTemperature

    @property
    def who(self) -> str:
        """Who computed them."""
        return SIDES[self.name]

    @property
    def masks(self) -> Sequence[Sequence[bool]]:
        """Which tokens count."""
        return [part.mask for part in self.parts]

    @property
    def recorded(self) -> Sequence[Sequence[float]]:
        """What the file says."""
        return [part.recorded[self.name] for part in self.parts]

    @cached_property
    def apart(self) -> Gap:
        """How far the recorded ones are from float32."""
        return gap(self.recorded, self.exact, self.masks)

    @cached_property
    def noise(self) -> Gap:
        """How far `dtype` is from float32."""
        return gap(self.rounded, self.exact, self.masks)

    @property
    def unit(self) -> float:
        """The mean noise, in nats a token."""
        return max(self.noise.mean, _LEAST_NOISE)

    @cached_property
    def given(self) -> float:
        """The mean log-probability that the checkpoint gives these tokens."""
        return mean(self.exact, self.masks)


@check(
    "CK602",
    "recorded log-probabilities are those of the checkpoint",
    stage="behaviour",
    needs=("sound headers",),
    unless=needs_rollout,
    rationale="Training corrects by the ratio of two log-probabilities. Where the engine's are not those of the "
    "weights, as after a bad update or shifted by one token, it learns from noise, and only the gap in a log says so.",
    fix="Record a rollout of one weight version with --save-debug-rollout-data and verify the checkpoint of that "
    "version. Where the trainer's log-probabilities fit and the engine's do not, verify what the engine loads.",
)
def same_log_probs(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Recorded responses again in transformers: the mean difference a token, in units of the format's noise."""
    recording = subject.once(recording_of)
    tally.facts["rollout"] = _described(recording)
    broken = list(_not_usable(recording, _vocabulary(subject)))
    if broken:
        tally.compared(0, len(recording.samples))
        yield from broken
        return
    if not recording.sides:
        raise Unable(f"{recording.path} has no log-probabilities: the engine was not asked for any (return_logprob)")
    if rounds_activations(quantization_of(read_config(home_of(subject))) or {}):
        raise Unable("the engine rounds activations of this format too, and ckptkit does not know the noise of that")
    parts, found = subject.once(run_recompute)
    unable = []
    for side in _sides(parts, found):
        tally.compared(0, sum(map(sum, side.masks)))
        try:
            yield from _judged(subject, recording, side, tally)
        except Unable as reason:
            unable.append(f"{side.who}: {reason}")
    if unable:
        raise Unable("; ".join(unable))


def _described(recording: Recording) -> list[str]:
    number = "" if recording.rollout is None else f" of rollout {recording.rollout}"
    versions = ", ".join(recording.versions) or "not recorded"
    return [f"{len(recording.samples)} samples{number}, made with weight versions: {versions}"]


def _vocabulary(subject: Subject) -> int:
    config = config_of(subject)
    return int(language_part(config)["vocab_size"])


def _not_usable(recording: Recording, vocabulary: int) -> Iterator[Issue]:
    """Token ids that the model does not have, and log-probabilities that are none."""
    for one in recording.samples:
        if odd := next((token for token in one.tokens if not 0 <= token < vocabulary), None):
            yield Issue(
                f"token ids below {vocabulary}, the vocabulary of the checkpoint",
                f"{odd} in sample {one.index}",
                "the rollout was made with another model or tokenizer",
                file=recording.path,
            )
            break
    for side in recording.sides:
        counts = {one.index: _not_log_probs(one, side) for one in recording.samples}
        if total := sum(counts.values()):
            first = next(index for index, count in counts.items() if count)
            yield Issue(
                "log-probabilities: finite numbers not above 0",
                f"{total} of {SIDES[side]} are not, first in sample {first}",
                "serve the checkpoint of that step alone: `verify --engine` says whether it answers with numbers",
                file=recording.path,
                count=total,
            )


def _not_log_probs(sample: RecordedSample, side: str) -> int:
    values = zip(sample.log_probs.get(side, []), sample.mask, strict=False)
    return sum(written and not float("-inf") < value < _ABOVE_ZERO for value, written in values)


def _sides(parts: Sequence[Part], found: Recomputed) -> Iterator[_Side]:
    for name in SIDES:
        places = [place for place, part in enumerate(parts) if name in part.recorded]
        if places:
            exact, rounded = ([one[place] for place in places] for one in (found.exact, found.rounded))
            yield _Side(name, [parts[place] for place in places], exact, rounded, found.dtype, found.best[name])


def _judged(subject: Subject, recording: Recording, side: _Side, tally: Tally) -> Iterator[Issue]:
    """Raises Unable where the gap is too large and may have another reason than the weights."""
    apart = side.apart
    tally.tell("recorded log-probabilities compared with transformers")
    tally.facts.setdefault("log-probabilities of the rollout", []).extend(
        [
            f"{side.who} from transformers in float32, {apart.tokens} tokens of {len(side.parts)} samples: {apart}",
            f"transformers in {side.dtype} from float32: {side.noise}",
            f"{side.who} is {apart.mean / side.unit:.2f} times the noise away",
            f"the checkpoint gives these tokens {side.given:.3f} nats each",
        ]
    )
    if not math.isfinite(side.given):
        yield Issue(
            "finite log-probabilities from the checkpoint itself, in float32",
            f"transformers computes {side.given} for recorded tokens",
            "verify the checkpoint without the rollout first: its values or its config are broken",
            file=subject.path,
        )
    elif not math.isfinite(side.noise.mean):
        raise Unable(f"transformers computes no numbers in {side.dtype}, so the noise of that is not known")
    elif apart.tokens < _FEW:
        raise Unable(f"{apart.tokens} tokens are too few to judge a mean difference of {apart.mean:.4f} nats by")
    elif apart.mean <= FURTHEST * side.unit:
        yield from _samples_too_far(subject, recording, side)
    else:
        yield _too_far(subject, recording, side)


def _too_far(subject: Subject, recording: Recording, side: _Side) -> Issue:
    """What the gap looks like. Raises Unable where it may have another reason than the weights."""
    expected = (
        f"log-probabilities of {side.who} within {FURTHEST:g} times the noise of {side.dtype} (mean {side.unit:.4f})"
    )
    if (shifted := _shifted(side)) is not None:
        return Issue(expected, f"{shifted[0]}: {side.apart}", shifted[1], file=recording.path)
    if (heated := _at_other_temperature(subject, recording, side)) is not None:
        # What metadata calls a temperature may be none; an option is meant.
        severity: Severity = "warning" if subject.options.rollout_temperature is None else "error"
        return Issue(expected, f"{heated[0]}: {side.apart}", heated[1], file=recording.path, severity=severity)
    times = f"{side.apart.mean / side.unit:.1f} times"
    if doubt := _doubt(subject, recording, side):
        raise Unable(f"{times} the noise away ({side.apart}), but {doubt}")
    severity = "warning" if side.apart.k3 < _JITTER else "error"
    hint = _what_next(side, recording)
    return Issue(expected, f"{times}: {side.apart}", hint, file=recording.path, severity=severity)


def _shifted(side: _Side) -> tuple[str, str] | None:
    """What is said of log-probabilities that are those of the tokens beside their own, and the next move."""
    found = {offset: one.mean for offset, one in neighbours(side.recorded, side.exact, side.masks)}
    offset = min(found, key=lambda one: found[one], default=0)
    if not offset or not found[offset] <= FURTHEST * side.unit:
        return None
    which, cut = ("next", "late") if offset > 0 else ("previous", "early")
    return (
        f"they fit the {which} token (mean {found[offset]:.4f}) and not their own",
        f"an offset by one: the log-probabilities begin one token too {cut} for the tokens of the response",
    )


def _at_other_temperature(subject: Subject, recording: Recording, side: _Side) -> tuple[str, str] | None:
    """As `_shifted`, where they fit at another temperature than is stated. Raises Unable where none is stated."""
    stated_temperatures = {part.temperature for part in side.parts}
    # At a lower temperature logits are larger, and so is their noise.
    unit = side.unit * min(max(1.0, max(stated_temperatures) / side.best.temperature), 2.0)
    near = all(abs(side.best.temperature / one - 1) < _SAME_TEMPERATURE for one in stated_temperatures)
    if near or not side.best.mean <= FURTHEST * unit:
        return None
    if subject.options.rollout_temperature is None and all(one.temperature is None for one in recording.samples):
        raise Unable(
            f"they are those of the checkpoint at a temperature of {side.best.temperature:.3g}, by which SGLang "
            "divides logits before it records, or logits are scaled wrongly; the file has no temperature: give "
            "--rollout-temperature"
        )
    stated = ", ".join(f"{one:g}" for one in sorted(stated_temperatures))
    return (
        f"they fit at a temperature of {side.best.temperature:.3g}, and {stated} is stated",
        "give the trainer and the engine the same temperature (slime's --rollout-temperature)",
    )


def _what_next(side: _Side, recording: Recording) -> str:
    hints = []
    if side.apart.k3 < _JITTER:
        hints.append(f"a KL below {_JITTER:g} is jitter of kernels by miles' debugging guide")
    if side.apart.k3 > _CONFIGURATION:
        hints.append(
            f"a KL above {_CONFIGURATION:g} points at configuration: compare config.json, parallel sizes and precision"
        )
    if side.given <= _OFF_TEMPLATE:
        hints.append(
            f"the checkpoint gives the responses {side.given:.2f} nats a token; {_OFF_TEMPLATE:g} or less for an "
            "instruct model points at the chat template (CK603)"
        )
    made = f" {recording.versions[0]}" if recording.versions else ""
    return "; ".join(
        [*hints, f"verify the checkpoint that weight version{made} was, in the format that was served: no other fits"]
    )


def _doubt(subject: Subject, recording: Recording, side: _Side) -> str:
    """What else than the weights may part recorded log-probabilities from the checkpoint's; empty for nothing."""
    chosen = {part.index for part in side.parts}
    doubts = []
    if len(recording.versions) > 1:
        doubts.append(f"samples were made with several weight versions ({', '.join(recording.versions)})")
    if any(one.clipped for one in recording.samples if one.index in chosen):
        doubts.append("they were sampled with top-p, and may be those among the tokens that it kept")
    if subject.is_megatron and quantization_of(read_config(home_of(subject))):
        doubts.append("its HF directory is quantized: an engine that serves this model so has rounded the weights")
    return "; ".join(doubts)


def _samples_too_far(subject: Subject, recording: Recording, side: _Side) -> Iterator[Issue]:
    """Single samples that the mean of all hides. Raises Unable as `_too_far`."""
    far: dict[int, Gap] = {}
    for part, recorded, exact, rounded in zip(side.parts, side.recorded, side.exact, side.rounded, strict=True):
        if sum(part.mask) >= _SHORT:
            own, noise = gap([recorded], [exact], [part.mask]), gap([rounded], [exact], [part.mask])
            if not own.mean <= FURTHEST_SAMPLE * max(side.unit, noise.mean):
                far[part.index] = own
    if not far:
        return
    named = f"sample{'s' * (len(far) > 1)} {', '.join(map(str, far))}"
    if doubt := _doubt(subject, recording, side):
        raise Unable(f"{named} of {side.who}: not the log-probabilities of the checkpoint, but {doubt}")
    yield Issue(
        f"every sample of {side.who} within {FURTHEST_SAMPLE:g} times the noise (mean {side.unit:.4f})",
        f"of {len(side.parts)} samples {named} not: {next(iter(far.values()))}",
        "other weights or another prompt made these than the file says: look at how they were sampled",
        file=recording.path,
        count=len(far),
    )
