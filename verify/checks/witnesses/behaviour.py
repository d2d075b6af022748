"""CK606 and CK607: log-probabilities in Megatron, and whether the model predicts text."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.verify.checks.witnesses.megatron import format_ranks, require_finished
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, Tally, check, warning_if
from ckptkit.verify.evidence.expected import config_of
from ckptkit.verify.evidence.side_files import TOKENIZER
from ckptkit.verify.witnesses.live.run import run_engine_reference
from ckptkit.verify.witnesses.megatron.run import Computed, computes_in, run_megatron_logits
from ckptkit.verify.witnesses.reference.run import prompts_of, run_prediction


def _in_transformers(subject: Subject) -> None:
    with_engine = "engine" in subject.against
    if "megatron" in subject.against and subject.is_megatron and not with_engine:
        raise NotApplicable("CK606 compares Megatron; without --against-megatron, --logits runs transformers")
    if with_engine and not (subject.path / TOKENIZER).exists():
        raise NotApplicable("there is no tokenizer.json to encode texts with")


@check("CK607", stage="behaviour", needs=("logits",), applies_to=_in_transformers)
def predicts_text(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Bits a byte of fixed texts in English, Python and Chinese in transformers; untrained weights are not judged."""
    from ckptkit.verify.witnesses.reference.prediction import NO_TEXT, POOR_TEXT, bits_a_byte, looks_trained

    with_engine = "engine" in subject.against
    reference = (run_engine_reference if with_engine else run_prediction)(subject)
    predicted = reference.predicted
    assert predicted is not None
    bits, trained = bits_a_byte(predicted), looks_trained(predicted)
    tally.compared(len(bits))
    line = ", ".join(f"{what} {one:.2f}" for what, one in zip(("English", "Python", "Chinese"), bits, strict=True))
    tally.facts["bits a byte of fixed texts"] = [
        line if trained else f"{line}; the weights look untrained, so this is not judged"
    ]
    best = min(bits)
    if trained and best <= NO_TEXT:
        tally.add_to_verdict(f"predicts text{'' if best <= POOR_TEXT else ' poorly'}: {line} bits a byte")
    if trained and best > POOR_TEXT:
        expected = f"at most {POOR_TEXT} bits a byte of the best of these texts"
        result = "it does not predict text" if best > NO_TEXT else "it predicts text poorly"
        yield Issue(expected, f"{best:.2f}: {result} ({line})", severity=warning_if(best <= NO_TEXT))
    if with_engine:
        return  # CK601 judges the engine, with random tokens if the weights are untrained
    tally.note(f"--logits ran only transformers ({reference.dtype}): --engine --logits runs an engine too")
    if not trained:
        raise CannotCheck("the weights look untrained, so whether they predict text is not judged")


# Times the noise of the checkpoint's dtype. Megatron in float32 has none, except near ties between experts; in the
# dtype itself it has as much as an engine (CK601).
_IN_FLOAT32, _IN_ITS_DTYPE = 0.1, 3.0


@check("CK606", stage="behaviour", needs=("megatron", "logits"))
def same_logits_in_megatron(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Log-probabilities of fixed prompts in megatron-core against transformers, in units of the dtype's noise."""
    require_finished(subject)
    prompts = prompts_of(config_of(subject), with_long=False)
    for dtype in computes_in(subject):
        yield from judge_run(run_megatron_logits(subject, prompts, dtype), subject, tally)


def judge_run(run: Computed, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Compares one run with transformers."""
    from ckptkit.verify.witnesses.reference.distance import distance, mean_gap, not_finite_logprobs

    answers = [answer for judged in run.answers.values() for answer in judged]
    broken, count = not_finite_logprobs(answers)
    tally.compared(count)
    if run.reference is None:
        hint = "CK401 and CK402 list tensors that Megatron did not load; else the weights are not finite (CK204)"
        yield Issue("a finite log-probability for every token", f"{broken} of {count} are not", hint)
        return
    reference, exact = run.reference, run.reference.exact
    noise = distance(reference.rounded, exact)
    tally.add_to_verdict("log-probabilities compared with transformers")
    tally.facts.setdefault("log-probabilities in Megatron", []).extend(
        [
            f"megatron-core {run.version} in {run.dtype} ({run.sizes}, {run.device}) from transformers in "
            f"float32: {distance(run.answers[min(run.answers)], exact)}",
            f"transformers in {reference.dtype} from float32: {noise}",
        ]
    )
    limit = (_IN_FLOAT32 if run.dtype == "float32" else _IN_ITS_DTYPE) * noise.mean
    gaps = {rank: mean_gap(judged, exact) for rank, judged in run.answers.items()}
    wrong = {rank: gap for rank, gap in gaps.items() if not gap <= limit}
    if not wrong:
        return
    expected = (
        f"log-probabilities of Megatron in {run.dtype} within {limit:.2g} nats of transformers' (mean; the noise of "
        f"{reference.dtype} is {noise.mean:.2g})"
    )
    hint, rank = "compare the training arguments with the release (CK701, CK702)", None
    if len(wrong) < len(gaps):
        hint = "report it with the parallel sizes and the megatron-core version: the other ranks are within the limit"
        rank = format_ranks(wrong)
    yield Issue(expected, f"mean {max(wrong.values()):.2g}", hint, rank=rank)
