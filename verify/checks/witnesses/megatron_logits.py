"""CK606: whether Megatron computes what transformers computes, and from which part of the model on it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from converters.planner import dims_of
from verify.check import Tally, check
from verify.checks.witnesses.megatron import finished
from verify.checks.witnesses.slices import ranks_named
from verify.evidence.expected import config_of
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.megatron.run import Computed, computes_in, run_megatron_logits
from verify.witnesses.reference.job import Reference
from verify.witnesses.reference.residuals import EMBEDDING, FINAL_NORM, FURTHEST, OUTPUT, Stage
from verify.witnesses.reference.run import prompts_of

_NAMED = 4  # parts that a finding names
_HINTS = {
    EMBEDDING: "compare the embedding, its scale and the order of its rows with the release",
    FINAL_NORM: "compare the final norm, its epsilon and --apply-layernorm-1p with the release",
    OUTPUT: "compare the output layer, and whether it is tied to the embedding, with the release",
    "attention": "compare that layer's q, k and v, the norms before and in it, --rotary-base, --rotary-percent and the "
    "scaling of positions with the release; where other layers differ too, their order",
    "MLP": "compare that layer's gate and up, its router and experts, the norm before it and the routing arguments "
    "with the release",
    "layer": "compare that layer's tensors and the training arguments with the release",
}


@check(
    "CK606",
    "Megatron computes what transformers computes",
    stage="behaviour",
    needs=("megatron", "logits"),
    rationale="Every slice can be in its place while Megatron computes something else with it: another rotary base or "
    "norm, a score function, a layer that another argument turns off, a rank that is left out of a sum.",
    fix="The finding names the first part that differs when both programs are given the same input. Compare its "
    "tensors, and the arguments that CK701 and CK702 look at, with the release; see docs/mappings.md for the model.",
)
def same_logits_in_megatron(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Log-probabilities of fixed prompts in the parallel sizes asked for, in units of the measured noise.

    In float32, and on GPUs also in the checkpoint's dtype. Where they differ, the parts of the model: the embedding,
    each layer's attention and MLP, the final norm and the output layer, each from Megatron's own input.
    """
    finished(subject)
    prompts = prompts_of(config_of(subject), with_long=False)
    for dtype in computes_in(subject, prompts):
        yield from judge(run_megatron_logits(subject, prompts, dtype), subject, tally)


def judge(run: Computed, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """What one run shows."""
    from verify.witnesses.reference.distance import distance, mean_gap, not_finite, spacing

    answers = [answer for judged in run.answers.values() for answer in judged]
    broken, count = not_finite(answers)
    tally.compared(0, count)
    if run.reference is None:
        hint = "CK401 and CK402 name what Megatron did not load; else the weights themselves are not finite (CK204)"
        yield Issue("a finite log-probability for every token", f"{broken} of {count} are not", hint, file=subject.path)
        return
    reference, exact = run.reference, run.reference.exact.judged
    noise = distance(reference.rounded.judged, exact)
    unit = max(noise.mean, spacing(exact))
    tally.tell("log-probabilities compared with transformers")
    tally.facts.setdefault("log-probabilities in Megatron", []).extend(
        [
            f"megatron-core {run.version} in {reference.dtype} ({run.sizes}, {run.device}) from transformers in "
            f"{reference.exact_dtype}: {distance(run.answers[min(run.answers)], exact)}",
            f"transformers in {reference.dtype} from {reference.exact_dtype}: {noise}",
        ]
    )
    gaps = {rank: mean_gap(judged, exact) for rank, judged in run.answers.items()}
    astray = {rank: gap for rank, gap in gaps.items() if not gap <= FURTHEST * unit}
    if astray:
        expected = f"log-probabilities within {FURTHEST:g} times the noise of {reference.dtype} (mean {unit:.2g})"
        yield from _located(expected, astray, len(gaps), reference, subject, tally)


def _located(
    expected: str, astray: Mapping[int, float], ranks: int, reference: Reference, subject: Subject, tally: Tally
) -> Iterator[Issue]:
    """Log-probabilities that are too far away on some of the ranks that have them: which part of the model it is."""
    worst = max(astray.values())
    rank = None if len(astray) == ranks else ranks_named(astray)
    different = [stage for stage in reference.stages if stage.differs]
    if different:
        actual = f"mean {worst:.2g}; {_named(different, len(reference.stages))}"
        yield Issue(expected, actual, _hint(different[0]), file=subject.path, rank=rank)
    elif reference.stages and rank is None:
        # The whole is made of these parts, so what is left is rounding that grew, or turned a choice of experts.
        tally.note(
            f"Megatron's log-probabilities are {worst:.2g} from transformers', though none of {len(reference.stages)} "
            "parts of the model differs: rounding grows from layer to layer, and decides near ties between experts"
        )
    else:
        hint = "compare the training arguments with the release" if rank is None else "these ranks alone are wrong"
        unseen = f"; where is not seen: {reference.unseen}" if reference.unseen else ""
        near_ties = rank is None and dims_of(config_of(subject)).experts > 0
        yield Issue(
            expected,
            f"mean {worst:.2g}{unseen}",
            f"{hint}; near ties between experts can do this too" if near_ties else hint,
            file=subject.path,
            rank=rank,
            severity="warning" if near_ties else "error",
        )


def _named(different: Sequence[Stage], count: int) -> str:
    first, *others = different
    more = [stage.name for stage in others[: _NAMED - 1]]
    rest = f" and {len(others) - len(more)} more" if len(others) > len(more) else ""
    also = f"; then {', '.join(more)}{rest}, of {count} parts" if others else f"; no other of {count} parts does"
    return f"the first part that differs is {first}{also}"


def _hint(stage: Stage) -> str:
    return next(hint for part, hint in _HINTS.items() if part in stage.name)
