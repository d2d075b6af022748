"""CK607: whether the model predicts text."""

from __future__ import annotations

from collections.abc import Iterator

from verify.check import Tally, Unable, check
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.skip import Inapplicable
from verify.witnesses.live.run import run_engine_reference
from verify.witnesses.reference.job import Predicted
from verify.witnesses.reference.run import run_prediction


def _in_megatron(subject: Subject) -> str | None:
    of_megatron = "megatron" in subject.against and subject.is_megatron and "engine" not in subject.against
    return "CK606 compares Megatron; --logits alone asks transformers" if of_megatron else None


@check(
    "CK607",
    "the model predicts text",
    stage="behaviour",
    needs=("logits",),
    rationale="A fault that every layer has, such as norms less one, leaves no layer that differs. The model then "
    "predicts text no better than one that knows how often words occur.",
    fix="Run the release the same way. If it predicts text, compare every value: `ckptkit verify CKPT --source "
    "RELEASE`; else compare config.json and the tokenizer with the release.",
    unless=_in_megatron,
)
def predicts_text(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Bits a byte of fixed texts in English, Python and Chinese, under the model's own tokenizer, in transformers.

    Needs no GPU and no engine. Weights that look untrained are not judged.
    """
    from verify.witnesses.reference.prediction import looks_trained

    with_engine = "engine" in subject.against
    reference = subject.once(run_engine_reference if with_engine else run_prediction)
    predicted = reference.predicted
    if predicted is None:
        raise Inapplicable("there is no tokenizer.json, so no text can be given to the model")
    yield from _predicts(predicted, subject, tally)
    if with_engine:
        return  # CK601 judges the engine, with random tokens if the weights are untrained
    tally.note(f"--logits asked transformers alone ({reference.dtype}), no engine: --engine --logits asks one too")
    if not looks_trained(predicted):
        raise Unable("the weights look untrained, so whether they predict text is not judged")


def _predicts(predicted: Predicted, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Whether the text that is predicted best is predicted as text; nothing of weights that look untrained."""
    from verify.witnesses.reference.prediction import NO_TEXT, POOR_TEXT, bits_a_byte, looks_trained

    bits, trained = bits_a_byte(predicted), looks_trained(predicted)
    tally.compared(0, len(bits))
    line = ", ".join(f"{what} {one:.2f}" for what, one in zip(("English", "Python", "Chinese"), bits, strict=True))
    untrained = "" if trained else "; the weights look untrained, so this is not judged"
    tally.facts["bits a byte of fixed texts"] = [f"{line}{untrained}"]
    best = min(bits)
    if trained and best <= NO_TEXT:
        tally.tell(f"predicts text{'' if best <= POOR_TEXT else ' poorly'}: {line} bits a byte")
    if trained and best > POOR_TEXT:
        yield Issue(
            f"at most {POOR_TEXT} bits a byte of the text that is predicted best",
            f"{best:.2f}: {'it does not predict text' if best > NO_TEXT else 'it predicts text poorly'} ({line})",
            "compare every value with the release (--source); then its config.json and tokenizer",
            file=subject.path,
            severity="error" if best > NO_TEXT else "warning",
        )
