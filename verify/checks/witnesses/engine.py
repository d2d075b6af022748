"""CK511 to CK513 and CK601: the checkpoint in a live engine, SGLang or vLLM. All checks share one run."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.specs import summarize
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, Subject, check, warning_if
from ckptkit.verify.evidence.folding import group_by_pattern
from ckptkit.verify.witnesses.live.job import AGAIN, DRAFT, FIRST, RESUMED, EngineReport, Reload
from ckptkit.verify.witnesses.live.run import (
    EngineRun,
    no_second_load,
    run_draft_engine,
    run_engine,
    run_engine_reference,
    running_engine,
)
from ckptkit.verify.witnesses.runner import inconclusive

DECODING = "with speculative decoding"
_FP8_CACHE = "a key-value cache in FP8 (--kv-cache-dtype)"
_CACHE_HINT = f"with {_FP8_CACHE}, release only kv_cache: no update sends these scales, and nothing else uses them"
FURTHEST = 3.0  # times the noise of the format; lab/gpu-results.md lists sound and broken models


@check("CK511", stage="engine", needs=("engine",))
def answers(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The engine serves the directory: log-probabilities of fixed prompts are numbers, before and after updates."""
    from ckptkit.verify.witnesses.reference.distance import not_finite_logprobs

    report = run_engine(subject).require_report()
    label = running_engine(subject).label
    result.facts[f"{label} engine"] = [f"{label} {report.version}, on {report.device}", *_tensor_facts(report)]
    for name, outputs in report.passes.items():
        broken, count = not_finite_logprobs(outputs)
        result.compared(count)
        if broken:
            yield Issue("a finite log-probability for every token", f"{broken} of {count} are not finite, {name}")


def _tensor_facts(report: EngineReport) -> list[str]:
    if not report.held:
        return []
    line = f"read back {report.held} parameters, buffers and other tensors of {report.held_bytes / 1e9:.2f} GB"
    line += f", {report.draft_held} of them of the draft model" if report.draft_held else ""
    changing = map(summarize, group_by_pattern(report.volatile))
    return [line, *(f"not compared, since requests change them: {text}" for text in changing)]


@check("CK512", stage="engine", needs=("update",))
def second_load(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The checkpoint is loaded again, twice by tensor and twice from disk, first over poisoned parameters."""
    yield from _reloads(subject, result, "updating ")


@check("CK513", stage="engine", needs=("release-resume",))
def resumed(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every tensor and buffer is the same after memory was released and resumed, and weights updated."""
    yield from _reloads(subject, result, RESUMED)


def _reloads(subject: Subject, result: CheckResult, kind: str) -> Iterator[Issue]:
    """The differences after steps of a kind, in the plain engine and, if there are draft layers, in one with them."""
    if (why := no_second_load(subject)) is not None:
        raise CannotCheck(why)
    run_engine(subject).require_report()
    runs = {"": run_engine(subject), DECODING: run_draft_engine(subject)}
    label, earlier = running_engine(subject).label, dict[str, Reload]()
    for decoding, run in runs.items():
        if run is None or run.report is None:
            continue
        result.facts |= {f"{label} engine, {decoding}": _tensor_facts(run.report)} if decoding else {}
        for step in (step for step in run.report.reloads if step.name.startswith(kind)):
            if not step.refused:
                result.compared(run.report.held - len(run.report.volatile), nbytes=run.report.held_bytes)
            yield from _differences(step, earlier.get(step.name), subject)
            earlier.setdefault(step.name, step)
    if reasons := [reason for name, run in runs.items() if run and (reason := _why_incomplete(label, name, run, kind))]:
        raise CannotCheck("; ".join(reasons))


def _why_incomplete(label: str, decoding: str, run: EngineRun, kind: str) -> str | None:
    """Why the steps of an engine are incomplete, or None."""
    if run.report is None:
        return f"{decoding}: {run.failed or 'the engine gave no report'}"
    prefix = f"{decoding}: " if decoding else ""
    if not run.report.complete:
        return str(inconclusive(f"{prefix}the engine ended", run.failed))
    if not any(step.name.startswith(kind) for step in run.report.reloads):
        return f"{prefix}not run because {label} refused an earlier update (CK512, CK513)"
    return None


def _differences(step: Reload, other: Reload | None, subject: Subject) -> Iterator[Issue]:
    """The differences after a step, without those of `other`, the same step of another engine."""
    other, label = other or Reload(step.name), running_engine(subject).label
    if step.refused:
        hint = "update by tensor instead, as the steps before this one did"
        if step.tried:
            hint = f"use another kind of update: {label} cannot load this checkpoint again (later steps were not run)"
        if step.refused != other.refused:
            actual = f"{label} refuses {step.name}: {step.refused}"
            yield Issue("the same checkpoint loaded again", actual, hint, severity=warning_if(not step.tried))
        return
    expected = "the bits of the first load"
    hint = f"do not train with this kind of update: after it {label} serves other weights than after a start"
    for key in sorted({*step.changed} - {*other.changed}):
        rank, _, name = key.partition(" ")
        actual = f"different bits{' in the draft model' * name.startswith(DRAFT)} after {step.name}"
        is_scale = running_engine(subject).has_default(name)
        its_hint, severity = _CACHE_HINT if is_scale else hint, warning_if(is_scale)
        yield Issue(expected, actual, its_hint, names=[name], rank=rank, severity=severity, file=None)
    named = {key.partition(" ")[2].removeprefix(DRAFT) for key in (*step.changed, *other.changed)}
    actual = f"{label}'s weight checker found different bits after {step.name}"
    yield Issue(expected, actual, hint, names=sorted({*step.unequal} - named - {*other.unequal}), file=None)


@check("CK601", stage="behaviour", needs=("engine", "logits"))
def same_logits(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Log-probabilities of fixed prompts, one of 4096 tokens, against transformers, in units of the format's noise."""
    from ckptkit.verify.witnesses.reference.distance import best_tokens, distance, not_finite_logprobs

    passes = run_engine(subject).require_report().passes
    if not_finite_logprobs(passes[FIRST])[0]:
        raise CannotCheck("not run because the engine's answers are not numbers", "CK511")
    reference = run_engine_reference(subject)
    dtype, exact = reference.dtype, reference.exact
    measured, noise = distance(passes[FIRST], exact), distance(reference.rounded, exact)
    between = distance(passes[FIRST], passes[AGAIN])
    result.compared(sum(len(answer.tokens) for answer in exact))
    unit, label = max(noise.mean, 1e-4), running_engine(subject).label
    result.add_to_verdict("log-probabilities compared with transformers")
    result.facts["log-probabilities"] = [
        f"{label} from transformers in float32: {measured}",
        f"transformers in {dtype} from float32: {noise}",
        f"{label} from its first to its second answer: mean {between.mean:.4f}, largest {between.largest:.3f}",
        f"{label} differs by {measured.mean / unit:.2f} times the noise",
    ]
    bound = f"{FURTHEST:g} times the noise of {dtype} (mean {unit:.4f})"
    if not measured.mean <= FURTHEST * unit:  # NaN too
        yield Issue(f"log-probabilities within {bound}", f"{measured.mean / unit:.1f} times the noise: {measured}")
    if not between.mean <= FURTHEST * unit:
        actual = f"{between.mean / unit:.1f} times the noise: mean {between.mean:.4f}, largest {between.largest:.3f}"
        hint = f"try another format or group size: {label}'s kernels for this format are nondeterministic"
        yield Issue(f"the same answers to the same prompts, within {bound}", actual, hint)
    if best_tokens(passes[FIRST]) == 1 < best_tokens(exact):
        expected = f"{best_tokens(exact)} different tokens as the most probable ones, as in transformers"
        hint = f"run `verify --against-{running_engine(subject).name}`, since a part of the model has no effect"
        yield Issue(expected, "the same token at every position", hint)
