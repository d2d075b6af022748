"""What a live engine does with the weights beyond log-probabilities: the text it writes, the experts it chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.hf.side_files import quantization_of
from verify.check import Skip, Tally, Unable, check
from verify.checks.witnesses.engine import FURTHEST, rounds_activations
from verify.checks.witnesses.megatron import finished
from verify.checks.witnesses.sglang import no_routers
from verify.evidence.expected import config_of
from verify.evidence.folding import LAYER
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.engine.job import FIRST, Answers, EngineReport
from verify.witnesses.engine.run import judged_by_transformers, prompts_of, run_engine, run_reference, run_source
from verify.witnesses.megatron.run import run_megatron_logits
from verify.witnesses.sglang.names import routers

if TYPE_CHECKING:
    from verify.witnesses.engine.text import Figures

APART_NATS = 0.5  # a token; engines and transformers are within 0.01 on sound models (docs/gpu-results.md)
MORE = 0.3  # of repeated runs, or of tokens that are no text, than the reference has
EXACT = 0.1  # times the noise of the dtype: Megatron computes in float32 here, as transformers does
FEW = 0.02  # of the choices of experts: near ties flip by rounding alone


def _engine(subject: Subject) -> EngineReport:
    """What the engine said. Raises Unable where it said nothing, Skip where that is no numbers."""
    from verify.witnesses.engine.distance import not_finite

    run = subject.once(run_engine)
    if run.report is None:
        raise Unable(run.failed or "the engine gave no report")
    if not_finite(run.report.passes[FIRST])[0]:
        raise Skip("not run because the engine's answers are no numbers (CK511)")
    return run.report


def _by_precision(reference: Mapping[str, Answers]) -> tuple[Answers, str, Answers]:
    """In float32, and the other dtype with what it gave."""
    ((dtype, rounded),) = ((name, given) for name, given in reference.items() if name != "float32")
    return reference["float32"], dtype, rounded


@check(
    "CK604",
    "a live SGLang engine writes text that transformers would write",
    stage="behaviour",
    needs=("engine", "logits"),
    rationale="Log-probabilities of random prompts say little of what users read: a model that is slightly wrong "
    "everywhere drifts into repetition or noise as it writes.",
    fix="Compare the figures with those of the source; then `verify --against-sglang`, and --source for the values.",
)
def text(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Greedy continuations of fixed openings: what transformers, and the source's weights in it, make of them."""
    from verify.witnesses.engine.text import figures, loss, perplexity, tokenizer_of

    report = _engine(subject)
    count = sum(len(one.ids) for one in report.written)
    if not count:
        raise Unable("the engine wrote nothing")
    exact, dtype, rounded = _by_precision(subject.once(run_reference))
    tokenizer = tokenizer_of(subject.path)
    ours, judged = figures(report.written, tokenizer), loss(exact.scored)
    tally.compared(0, count)
    tally.facts["text"] = [
        f"SGLang {report.version} writes: {ours}",
        f"transformers gives that text perplexity {perplexity(judged)} ({dtype}: {perplexity(loss(rounded.scored))})",
        *([] if tokenizer else ["no tokenizer.json, so random tokens are continued"]),
    ]
    if not abs(judged - ours.loss) <= APART_NATS:  # NaN too
        yield Issue(
            f"text with a log-probability within {APART_NATS} nats a token of what transformers gives it",
            f"{-ours.loss:.2f} a token by SGLang, {-judged:.2f} by transformers",
            "SGLang computes something else than the weights say: see CK601, and run `verify --against-sglang`",
            file=subject.path,
        )
    whose = "transformers"
    if subject.source_path is not None and subject.source_kind == "hf":
        whose = "the source"
        exact, _, _ = _by_precision(subject.once(run_source))
        tally.facts["text"].append(f"the source gives it perplexity {perplexity(loss(exact.scored))}")
        yield from _unlike_source(ours.loss, loss(exact.scored), subject)
    theirs = figures(exact.written, tokenizer)
    tally.facts["text"].append(f"{whose} writes: {theirs}")
    yield from _worse(ours, theirs, whose, subject)


def _unlike_source(ours: float, source: float, subject: Subject) -> Iterator[Issue]:
    if not abs(source - ours) <= APART_NATS:
        yield Issue(
            f"text that the source would write, within {APART_NATS} nats a token",
            f"{-ours:.2f} a token by SGLang, {-source:.2f} by the source",
            "quantization costs this much, or these are other weights: CK305 and CK202 tell",
            file=subject.path,
            severity="warning",
        )


def _worse(ours: Figures, theirs: Figures, whose: str, subject: Subject) -> Iterator[Issue]:
    odd = (ours.odd or 0) - (theirs.odd or 0)
    for what, more in (("repeated runs of tokens", ours.repeated - theirs.repeated), ("tokens that are no text", odd)):
        if more > MORE:
            yield Issue(
                f"as few {what} as {whose} writes: {theirs}",
                str(ours),
                "read what the engine writes; quantization may have cost too much, or the weights are damaged",
                file=subject.path,
                severity="warning",
            )


@check(
    "CK605",
    "SGLang's routers choose the experts that transformers chooses",
    stage="behaviour",
    needs=("engine", "logits"),
    rationale="A router bias rounded to bfloat16, or a score function that an engine takes otherwise, sends tokens to "
    "other experts; every weight is in its place, and the answers are fluent.",
    fix="Compare the router's weight, its bias (in float32) and the routing keys of config.json with the release.",
    unless=no_routers,
)
def routing(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The experts of every token of the short prompts, layer by layer, in units of the format's noise."""
    from verify.witnesses.engine.distance import rerouted

    report = _engine(subject)
    if rounds_activations(quantization_of(read_json(subject.path / "config.json")) or {}):
        raise Unable("SGLang rounds activations of this format too, and ckptkit does not know the noise of that")
    if not subject.once(run_engine).routed_layers:
        raise Unable("SGLang gives the choices of experts only of models with num_experts_per_tok in config.json")
    exact, dtype, rounded = _by_precision(subject.once(run_reference))
    ours, noise = rerouted(report.routed, exact.routed), rerouted(rounded.routed, exact.routed)
    if not ours:
        raise Unable("the engine or transformers gave no choices of experts")
    tally.compared(0, len(ours))
    usual = sum(noise.values()) / len(noise)
    worst = max(ours, key=lambda layer: ours[layer])
    tally.facts["choices of experts"] = [
        f"SGLang {report.version}: {sum(ours.values()) / len(ours):.2%} are not those of transformers in float32; "
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


@check(
    "CK606",
    "Megatron computes what transformers computes",
    stage="behaviour",
    needs=("megatron", "logits"),
    rationale="Every slice can be in its place while Megatron computes something else with it: another rotary base or "
    "norm, a score function, a layer that another argument turns off.",
    fix="Compare the arguments that CK701 and CK702 look at with config.json; see docs/mappings.md for the model.",
)
def same_logits_in_megatron(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Log-probabilities of fixed prompts in float32, Megatron's on one rank, against transformers."""
    from verify.witnesses.engine.distance import distance, not_finite

    finished(subject)
    prompts = prompts_of(config_of(subject), with_long=False)
    report = run_megatron_logits(subject, prompts)
    broken, count = not_finite(report.judged)
    tally.compared(0, count)
    if broken:
        hint = "CK401 and CK402 name what Megatron did not load; else the weights themselves are not finite (CK204)"
        yield Issue("a finite log-probability for every token", f"{broken} of {count} are not", hint, file=subject.path)
        return
    reference = judged_by_transformers(subject, prompts, [answer.top_ids for answer in report.judged])
    exact, dtype, rounded = _by_precision(reference)
    found, noise = distance(report.judged, exact.judged), distance(rounded.judged, exact.judged)
    unit = max(noise.mean, 1e-4)
    tally.facts["log-probabilities in Megatron"] = [
        f"megatron-core {report.version} from transformers, both in float32: {found}",
        f"transformers in {dtype} from float32: {noise}",
    ]
    if not found.mean <= EXACT * unit:
        yield Issue(
            f"log-probabilities within {EXACT:g} times the noise of {dtype} (mean {unit:.4f})",
            f"{found.mean / unit:.2f} times: {found}",
            "Megatron and transformers compute other things from the same weights: compare the training arguments",
            file=subject.path,
        )
