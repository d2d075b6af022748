"""CK602, CK603, CK606 and CK607: output against transformers: recorded rollouts, Megatron, and fixed texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.converters.config.values import language_part
from ckptkit.formats.hf.reader import read_config
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.verify.checks.witnesses.engine import FURTHEST
from ckptkit.verify.checks.witnesses.megatron import format_ranks, require_finished
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, check, only_if, warning_if
from ckptkit.verify.core.report import CheckResult
from ckptkit.verify.evidence.expected import config_of
from ckptkit.verify.evidence.side_files import TOKENIZER, SideFiles
from ckptkit.verify.witnesses.live.run import run_engine_reference
from ckptkit.verify.witnesses.megatron.run import Computed, computes_in, run_megatron_logits
from ckptkit.verify.witnesses.reference.activations import rounds_activations
from ckptkit.verify.witnesses.reference.run import prompts_of, run_prediction
from ckptkit.verify.witnesses.rollouts import run as rollouts
from ckptkit.verify.witnesses.rollouts.recorded import SIDES, RecordedSample, Recording


def _in_transformers(subject: Subject) -> None:
    with_engine = "engine" in subject.against
    if "megatron" in subject.against and subject.kind == "megatron" and not with_engine:
        raise NotApplicable("with --against-megatron, --logits runs CK606 instead")
    if with_engine and not (subject.path / TOKENIZER).exists():
        raise NotApplicable("tokenizer.json, which encodes the texts, is missing")


@check("CK607", stage="behaviour", needs=("logits",), applies_to=_in_transformers)
def predicts_text(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Bits a byte of fixed texts in English, Python and Chinese in transformers; untrained weights are not judged."""
    from ckptkit.verify.witnesses.reference.prediction import NO_TEXT, POOR_TEXT, bits_a_byte, looks_trained

    with_engine = "engine" in subject.against
    reference = (run_engine_reference if with_engine else run_prediction)(subject)
    predicted = reference.predicted
    assert predicted is not None
    bits, trained = bits_a_byte(predicted), looks_trained(predicted)
    result.compared(len(bits))
    line = ", ".join(f"{what} {one:.2f}" for what, one in zip(("English", "Python", "Chinese"), bits, strict=True))
    untrained = "" if trained else "; not judged, since the weights look untrained"
    result.facts["bits a byte of fixed texts"] = [f"{line}{untrained}"]
    best = min(bits)
    if trained and best <= NO_TEXT:
        result.add_to_verdict(f"predicts text{'' if best <= POOR_TEXT else ' poorly'}: {line} bits per byte")
    if trained and best > POOR_TEXT:
        expected = f"at most {POOR_TEXT} bits per byte for at least one text"
        verdict = "does not predict text" if best > NO_TEXT else "predicts text poorly"
        yield Issue(expected, f"the model {verdict}: {line} bits per byte", severity=warning_if(best <= NO_TEXT))
    if with_engine:
        return  # CK601 judges the engine, with random tokens if the weights are untrained
    result.note(f"--logits ran only transformers ({reference.dtype}); add --engine to run an engine too")
    if not trained:
        raise CannotCheck("the weights look untrained, so CK607 cannot judge whether they predict text")


# Times the noise of the checkpoint's dtype. Megatron in float32 is exact, except near ties between experts; in the
# dtype itself it has as much as an engine (CK601).
_IN_FLOAT32, _IN_ITS_DTYPE = 0.1, 3.0


@check("CK606", stage="behaviour", needs=("megatron", "logits"))
def same_logits_in_megatron(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Log-probabilities of fixed prompts in megatron-core against transformers, in units of the dtype's noise."""
    require_finished(subject)
    prompts = prompts_of(config_of(subject), with_long=False)
    for dtype in computes_in(subject):
        yield from judge_run(run_megatron_logits(subject, prompts, dtype), subject, result)


def judge_run(run: Computed, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Compares one run with transformers."""
    from ckptkit.verify.witnesses.reference.distance import distance, mean_gap, not_finite_logprobs

    broken, count = not_finite_logprobs([answer for judged in run.answers.values() for answer in judged])
    result.compared(count)
    if run.reference is None:
        hint = "fix the findings of CK401, CK402 and CK204: the weights were not loaded, or are not finite"
        yield Issue("a finite log-probability for every token", f"{broken} of {count} are not finite", hint)
        return
    reference, exact = run.reference, run.reference.exact
    noise = distance(reference.rounded, exact)
    result.add_to_verdict("log-probabilities compared with transformers")
    facts = result.facts.setdefault("log-probabilities in Megatron", [])
    program = f"megatron-core {run.version} in {run.dtype} ({run.sizes}, {run.device})"
    facts.append(f"{program} from transformers in float32: {distance(run.answers[min(run.answers)], exact)}")
    facts.append(f"transformers in {reference.dtype} from float32: {noise}")
    limit = (_IN_FLOAT32 if run.dtype == "float32" else _IN_ITS_DTYPE) * noise.mean
    gaps = {rank: mean_gap(judged, exact) for rank, judged in run.answers.items()}
    wrong = {rank: gap for rank, gap in gaps.items() if not gap <= limit}
    if not wrong:
        return
    expected = f"log-probabilities of Megatron in {run.dtype} within {limit:.2g} nats of transformers', in the mean "
    expected += f"(rounding to {reference.dtype} changes them by {noise.mean:.2g})"
    hint, rank = "compare the training arguments with the release (CK701, CK702)", None
    if len(wrong) < len(gaps):
        hint = "report this with the parallel sizes and the megatron-core version: the other ranks are within the limit"
        rank = format_ranks(wrong)
    yield Issue(expected, f"a mean difference of {max(wrong.values()):.2g} nats", hint, rank=rank)


FURTHEST_SAMPLE = 10.0  # times the noise, for the mean of one sample, which scatters more
_LEAST_NOISE = 1e-4  # nats a token
_ABOVE_ZERO = 1e-3  # nats by which rounding may raise the log-probability of a certain token above 0
_FEW, _SHORT = 32, 8  # the fewest tokens of all samples, and of one, for a meaningful mean
_JITTER = 1e-4  # the KL of kernel jitter, by miles' debugging guide (docs/developer/debug.md)
_MAX_EXPONENT = 700.0  # exp of more overflows float64
_has_rollout = only_if(lambda subject: subject.options.rollout_data, "--rollout-data was not given")


@dataclass(frozen=True)
class LogprobGap:
    """The gap between the log-probabilities p by which `tokens` tokens were sampled and new ones q, in nats a token.

    mean, largest: of |p - q|. k3: the mean of exp(q - p) - 1 - (q - p), an estimate of the Kullback-Leibler divergence
    (John Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html).
    """

    tokens: int
    mean: float
    largest: float
    k3: float

    def __str__(self) -> str:
        return f"mean {self.mean:.4f} nats per token, largest {self.largest:.3f}; KL {self.k3:.2g} (k3)"


def gap(
    sampled: Sequence[Sequence[float]], other: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]
) -> LogprobGap:
    """The gap over the tokens in the masks, of which there must be one."""
    chosen = np.concatenate([np.asarray(mask, bool) for mask in masks])
    p, q = (np.concatenate([np.asarray(one, np.float64) for one in lists])[chosen] for lists in (sampled, other))
    ratio = np.minimum(q - p, _MAX_EXPONENT)
    k3 = float((np.expm1(ratio) - ratio).mean())
    return LogprobGap(p.size, float(np.abs(p - q).mean()), float(np.abs(p - q).max()), k3)


@check("CK602", stage="behaviour", needs=("sound headers",), applies_to=_has_rollout)
def same_log_probs(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Recorded responses against transformers: the mean difference per token, in units of the format's noise."""
    recording = rollouts.recording_of(subject)
    number = "" if recording.rollout is None else f" of rollout {recording.rollout}"
    versions = ", ".join(recording.versions) or "not recorded"
    result.facts["rollout"] = [f"{len(recording.samples)} samples{number}, made with weight versions: {versions}"]
    if broken := list(_not_usable(recording, int(language_part(config_of(subject))["vocab_size"]))):
        result.compared(len(recording.samples))
        yield from broken
        return
    if not recording.sides:
        raise CannotCheck(f"{recording.path} has no log-probabilities: the engine returned none (return_logprob)")
    if rounds_activations(quantization_of(read_config(rollouts.tokenizer_directory(subject))) or {}):
        raise CannotCheck("the engine rounds activations too, and ckptkit does not know how much that changes")
    reasons = []
    for side in recording.sides:
        try:
            yield from _judge(subject, recording, side, result)
        except CannotCheck as reason:
            reasons.append(f"{SIDES[side]}: {reason}")
    if reasons:
        raise CannotCheck("; ".join(reasons))


def _not_usable(recording: Recording, vocabulary: int) -> Iterator[Issue]:
    """Unknown token ids, and invalid log-probabilities."""
    ids = ((token, one.index) for one in recording.samples for token in one.tokens)
    if odd := next((f"{token} in sample {index}" for token, index in ids if not 0 <= token < vocabulary), None):
        hint = "record a rollout of this model: another model or tokenizer made this one"
        yield Issue(f"token ids below vocab_size {vocabulary}", f"token id {odd}", hint, file=recording.path)
    for side in recording.sides:
        wrong = [
            one.index
            for one in recording.samples
            for value, is_sampled in zip(one.log_probs.get(side, []), one.mask, strict=False)
            if is_sampled and not -np.inf < value < _ABOVE_ZERO
        ]
        if wrong:
            expected, count = "finite log-probabilities of at most 0", len(wrong)
            actual = f"{count} log-probabilities of {SIDES[side]} are not, the first in sample {wrong[0]}"
            hint = "verify the checkpoint of that step with --engine, which reports answers that are not finite"
            yield Issue(expected, actual, hint, file=recording.path, count=count)


def _gaps(rows: Sequence[rollouts.Recomputed], side: str) -> tuple[LogprobGap, LogprobGap]:
    """The gaps of the recording, and of transformers in an engine's dtype, from transformers in float32."""
    masks, exact = [part.mask for part, _, _ in rows], [one for _, one, _ in rows]
    recorded, rounded = [part.log_probs[side] for part, _, _ in rows], [one for *_, one in rows]
    return gap(recorded, exact, masks), gap(rounded, exact, masks)


def _judge(subject: Subject, recording: Recording, side: str, result: CheckResult) -> Iterator[Issue]:
    """Judges one side's log-probabilities. Raises CannotCheck if a large gap may have another reason."""
    dtype, every = rollouts.run_recompute(subject)
    rows = [row for row in every if side in row[0].log_probs]
    (recorded, noise), label = _gaps(rows, side), SIDES[side]
    unit = max(noise.mean, _LEAST_NOISE)
    result.compared(recorded.tokens)
    result.add_to_verdict("recorded log-probabilities compared with transformers")
    facts = result.facts.setdefault("log-probabilities of the rollout", [])
    facts.append(f"{label} from transformers in float32, {recorded.tokens} tokens of {len(rows)} samples: {recorded}")
    facts.append(f"this is {recorded.mean / unit:.2f} times the noise: transformers in {dtype} from float32, {noise}")
    if not np.isfinite(recorded.mean):
        actual = f"transformers computes {recorded.mean} for the recorded tokens"
        hint = "verify the checkpoint without the rollout first: its values or its config are wrong"
        yield Issue("finite log-probabilities from the checkpoint in float32", actual, hint)
        return
    if not np.isfinite(noise.mean):
        raise CannotCheck(f"transformers computes NaN in {dtype}, so the noise of this dtype is not known")
    if recorded.tokens < _FEW:
        raise CannotCheck(f"{recorded.tokens} tokens are too few to judge a difference of {recorded.mean:.4f} nats")
    doubt = _doubt(subject, recording, [part for part, _, _ in rows])
    if recorded.mean > FURTHEST * unit:
        times = f"{recorded.mean / unit:.1f} times"
        if doubt:
            raise CannotCheck(f"log-probabilities of {label} differ by {times} the noise ({recorded}), but {doubt}")
        made = f" {recording.versions[0]}" if recording.versions else ""
        jitter = f"ignore a KL below {_JITTER:g}, which miles' guide calls kernel jitter, or " * (recorded.k3 < _JITTER)
        hint = f"{jitter}verify the checkpoint of weight version{made} in the format that the engine served"
        expected = f"log-probabilities of {label} within {FURTHEST:g} times the noise of {dtype} (mean {unit:.4f})"
        actual = f"{times} the noise: {recorded}"
        yield Issue(expected, actual, hint, file=recording.path, severity=warning_if(jitter))
        return
    for row in rows:
        part, (one, own) = row[0], _gaps([row], side)
        if one.tokens >= _SHORT and one.mean > FURTHEST_SAMPLE * max(unit, own.mean):
            if doubt:
                raise CannotCheck(f"another model seems to have made sample {part.index} of {label}, but {doubt}")
            expected = f"sample {part.index} of {label} within {FURTHEST_SAMPLE:g} times the noise (mean {unit:.4f})"
            yield Issue(expected, str(one), "compare the weights and the prompt of this sample", file=recording.path)


def _doubt(subject: Subject, recording: Recording, parts: Sequence[RecordedSample]) -> str:
    """Other possible reasons for a gap than the weights, or ""."""
    doubts = []
    if any(part.temperature is None for part in parts):
        doubts.append("the file has no temperature, so 1 was used: pass --rollout-temperature")
    if len(recording.versions) > 1:
        doubts.append(f"several weight versions generated the samples ({', '.join(recording.versions)})")
    if any(part.clipped for part in parts):
        doubts.append("the engine sampled with top-p, which can raise recorded log-probabilities")
    if subject.kind == "megatron" and quantization_of(read_config(rollouts.tokenizer_directory(subject))):
        doubts.append("the HF directory is quantized, so an engine that serves it has rounded the weights")
    return "; ".join(doubts)


def _has_prompts(subject: Subject) -> None:
    """Raises NotApplicable for the trainer's own files, which have no prompts."""
    _has_rollout(subject)
    if not rollouts.recorded_prompts(subject):
        raise NotApplicable("the file of --rollout-data has no prompts with tokens")


@check("CK603", stage="behaviour", needs=("sound headers",), applies_to=_has_prompts)
def same_prompts(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The tokens of prompts by the checkpoint's tokenizer, and of messages by its template, are the recorded ones."""
    path, root = subject.options.rollout_data, rollouts.tokenizer_directory(subject)
    files = SideFiles(root)
    if not files.has_vocabulary and not files.sentencepiece:
        raise CannotCheck(f"{root} has no tokenizer, which is needed to render the recorded prompts")
    renderings = rollouts.run_templates(subject)
    result.compared(len(renderings))
    result.add_to_verdict("recorded prompts compared with transformers")
    assumed = {one.assumed: one.index for one in reversed(renderings) if one.assumed}
    facts = result.facts["prompts of the rollout"] = [f"transformers rendered {len(renderings)} different prompts"]
    facts += [f"sample {index} is equal with {option}, which is not recorded" for option, index in assumed.items()]
    if one := next((one for one in renderings if one.refused), None):
        actual, hint = f"sample {one.index} is refused: {one.refused}", "copy the template from the release"
        yield Issue("messages that the chat template accepts", actual, hint, file=path)
    if different := [one for one in renderings if one.different]:
        one, count = different[0], f"{len(different)} of {len(renderings)} prompts differ"
        hint = "compare tokenizer and chat template with the release, and check the job's --apply-chat-template-kwargs"
        yield Issue(f"the recorded tokens of sample {one.index}", f"{one.different}; {count}", hint, file=path)
