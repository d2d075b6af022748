"""What the weights do beyond log-probabilities: the text that they predict and write, the experts that they choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verify.check import Skip, Tally, Unable, check
from verify.checks.witnesses.engine import FURTHEST
from verify.checks.witnesses.loading import no_routers
from verify.evidence.expected import config_of, usable_config
from verify.evidence.folding import LAYER
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.live.job import FIRST, EngineReport
from verify.witnesses.live.run import (
    NO_COUNT,
    engine_of,
    no_choices,
    run_engine,
    run_engine_reference,
    run_source,
)
from verify.witnesses.loading.names import routers
from verify.witnesses.reference.job import Predicted
from verify.witnesses.reference.run import run_prediction

if TYPE_CHECKING:
    from verify.witnesses.reference.text import Figures

APART_NATS = 0.5  # a token; engines and transformers are within 0.01 on sound models (lab/gpu-results.md)
MORE = 0.3  # of repeated runs, or of tokens that are not text, than the reference has
FEW = 0.02  # of the choices of experts: near ties flip by rounding alone


def _engine(subject: Subject) -> EngineReport:
    """What the engine said. Raises Unable where it said nothing, Skip where that is not numbers."""
    from verify.witnesses.reference.distance import not_finite

    report = subject.once(run_engine).require_report()
    if not_finite(report.passes[FIRST])[0]:
        raise Skip("not run because the engine's answers are not numbers (CK511)")
    return report


@check(
    "CK604",
    "a live engine writes text that transformers would write",
    stage="behaviour",
    needs=("engine", "logits"),
    rationale="Log-probabilities of random prompts say little of what users read: a model that is slightly wrong "
    "everywhere drifts into repetition or noise as it writes.",
    fix="Compare the figures with those of the source; then `verify --against-sglang` or --against-vllm, and --source "
    "for the values.",
)
def text(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Greedy continuations of fixed openings: what transformers, and the source's weights in it, make of them."""
    from verify.witnesses.reference.text import figures, loss, perplexity, tokenizer_of

    report = _engine(subject)
    count = sum(len(one.ids) for one in report.written)
    if not count:
        raise Unable("the engine wrote nothing")
    reference = subject.once(run_engine_reference)
    exact, dtype, rounded = reference.exact, reference.dtype, reference.rounded
    tokenizer = tokenizer_of(subject.path)
    engine = engine_of(subject)
    ours, judged = figures(report.written, tokenizer), loss(exact.scored)
    tally.compared(0, count)
    tally.facts["text"] = [
        f"{engine.label} {report.version} writes: {ours}",
        f"transformers gives that text perplexity {perplexity(judged)} ({dtype}: {perplexity(loss(rounded.scored))})",
        *([] if tokenizer else ["no tokenizer.json, so random tokens are continued"]),
    ]
    if not abs(judged - ours.loss) <= APART_NATS:  # NaN too
        yield Issue(
            f"text with a log-probability within {APART_NATS} nats a token of what transformers gives it",
            f"{-ours.loss:.2f} a token by {engine.label}, {-judged:.2f} by transformers",
            f"{engine.label} computes something else than the weights say: see CK601, and run `verify "
            f"--against-{engine.name}`",
            file=subject.path,
        )
    whose = "transformers"
    if subject.source_path is not None and subject.source_is_hf:
        whose = "the source"
        exact = subject.once(run_source).exact
        tally.facts["text"].append(f"the source gives it perplexity {perplexity(loss(exact.scored))}")
        yield from _unlike_source(ours.loss, loss(exact.scored), subject)
    if reference.predicted is not None:
        yield from _predicts(reference.predicted, subject, tally)
    theirs = figures(exact.written, tokenizer)
    tally.facts["text"].append(f"{whose} writes: {theirs}")
    yield from _worse(ours, theirs, whose, subject)


def _without_engine(subject: Subject) -> str | None:
    if "engine" in subject.against:
        return "CK604 judges what the engine writes"
    of_megatron = "megatron" in subject.against and subject.is_megatron
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
    unless=_without_engine,
)
def predicts_text(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Bits a byte of fixed texts in English, Python and Chinese, under the model's own tokenizer, in transformers.

    Needs no GPU and no engine. Weights that look untrained are not judged.
    """
    from verify.witnesses.reference.prediction import looks_trained

    reference = subject.once(run_prediction)
    predicted = reference.predicted
    if predicted is None:
        raise Unable("transformers gave no log-probabilities")
    yield from _predicts(predicted, subject, tally)
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
    if trained and best > POOR_TEXT:
        yield Issue(
            f"at most {POOR_TEXT} bits a byte of the text that is predicted best",
            f"{best:.2f}: {'it does not predict text' if best > NO_TEXT else 'it predicts text poorly'} ({line})",
            "compare every value with the release (--source); then its config.json and tokenizer",
            file=subject.path,
            severity="error" if best > NO_TEXT else "warning",
        )


def _unlike_source(ours: float, source: float, subject: Subject) -> Iterator[Issue]:
    if not abs(source - ours) <= APART_NATS:
        yield Issue(
            f"text that the source would write, within {APART_NATS} nats a token",
            f"{-ours:.2f} a token by {engine_of(subject).label}, {-source:.2f} by the source",
            "quantization costs this much, or these are other weights: CK305 and CK202 tell",
            file=subject.path,
            severity="warning",
        )


def _worse(ours: Figures, theirs: Figures, whose: str, subject: Subject) -> Iterator[Issue]:
    odd = (ours.odd or 0) - (theirs.odd or 0)
    for what, more in (("repeated runs of tokens", ours.repeated - theirs.repeated), ("tokens that are not text", odd)):
        if more > MORE:
            yield Issue(
                f"as few {what} as {whose} writes: {theirs}",
                str(ours),
                "read what the engine writes; quantization may have cost too much, or the weights are damaged",
                file=subject.path,
                severity="warning",
            )


def _no_choices(subject: Subject) -> str | None:
    config = usable_config(subject)
    return no_routers(subject) or (no_choices(engine_of(subject), config) if config is not None else None)


@check(
    "CK605",
    "an engine's routers choose the experts that transformers chooses",
    stage="behaviour",
    needs=("engine", "logits"),
    rationale="A router bias rounded to bfloat16, or a score function that an engine takes otherwise, sends tokens to "
    "other experts; every weight is in its place, and the answers are fluent.",
    fix="Compare the router's weight, its bias (in float32) and the routing keys of config.json with the release.",
    unless=_no_choices,
)
def routing(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The experts of every token of the short prompts, layer by layer, in units of the format's noise."""
    from verify.witnesses.reference.distance import rerouted

    report = _engine(subject)
    if not subject.once(run_engine).routed_layers:
        raise Unable(NO_COUNT)
    reference = subject.once(run_engine_reference)
    dtype, exact = reference.dtype, reference.exact.routed
    ours, noise = rerouted(report.routed, exact), rerouted(reference.rounded.routed, exact)
    if not ours:
        raise Unable("the engine or transformers gave no choices of experts")
    tally.compared(0, len(ours))
    usual = sum(noise.values()) / len(noise)
    worst = max(ours, key=lambda layer: ours[layer])
    label = engine_of(subject).label
    tally.facts["choices of experts"] = [
        f"{label} {report.version}: {sum(ours.values()) / len(ours):.2%} are not those of transformers in float32; "
        f"most in layer {worst}, {ours[worst]:.2%}",
        f"transformers in {dtype}: {usual:.2%}, most {max(noise.values()):.2%}",
    ]
    astray = [layer for layer, share in ours.items() if share > FURTHEST * max(noise[layer], usual, FEW)]
    if astray:
        names = {int(match[1]): router for router in routers(config_of(subject)) if (match := LAYER.match(router))}
        yield Issue(
            f"the choices of transformers but for {FURTHEST:g} times the noise of {dtype} ({max(usual, FEW):.1%})",
            f"up to {ours[worst]:.1%} of the choices are other experts",
            "compare the router's weight, bias and its dtype, and the routing keys of config.json with the release",
            names=[names[layer] for layer in astray],
        )
