"""CK606: whether Megatron computes what transformers computes."""

from __future__ import annotations

from collections.abc import Iterator

from verify.check import Tally, check
from verify.checks.witnesses.megatron import finished
from verify.checks.witnesses.slices import ranks_named
from verify.evidence.expected import config_of
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.witnesses.megatron.run import Computed, computes_in, run_megatron_logits
from verify.witnesses.reference.run import prompts_of

# Times the noise of the checkpoint's dtype. Megatron in float32 has none of it, but for near ties between experts; in
# the dtype itself it has as much as an engine, which is judged alike (CK601).
_IN_FLOAT32, _IN_ITS_DTYPE = 0.1, 3.0


@check(
    "CK606",
    "Megatron computes what transformers computes",
    stage="behaviour",
    needs=("megatron", "logits"),
    rationale="Every slice can be in its place while Megatron computes something else with it: another rotary base or "
    "norm, a score function, a layer that another argument turns off, a rank that is left out of a sum.",
    fix="Compare the arguments that CK701 and CK702 look at with the release; see docs/mappings.md for the model.",
)
def same_logits_in_megatron(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Log-probabilities of fixed prompts in the parallel sizes asked for, in units of the noise of the dtype.

    Computed in float32, and on GPUs also in the checkpoint's dtype, by modules of megatron-core alone.
    """
    finished(subject)
    prompts = prompts_of(config_of(subject), with_long=False)
    for dtype in computes_in(subject):
        yield from judge(run_megatron_logits(subject, prompts, dtype), subject, tally)


def judge(run: Computed, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """What one run shows."""
    from verify.witnesses.reference.distance import distance, mean_gap, not_finite

    answers = [answer for judged in run.answers.values() for answer in judged]
    broken, count = not_finite(answers)
    tally.compared(0, count)
    if run.reference is None:
        hint = "CK401 and CK402 name what Megatron did not load; else the weights themselves are not finite (CK204)"
        yield Issue("a finite log-probability for every token", f"{broken} of {count} are not", hint, file=subject.path)
        return
    reference, exact = run.reference, run.reference.exact
    noise = distance(reference.rounded, exact)
    tally.tell("log-probabilities compared with transformers")
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
    all_ranks = len(wrong) == len(gaps)
    yield Issue(
        f"log-probabilities of Megatron in {run.dtype} within {limit:.2g} nats of transformers' (mean; the noise of "
        f"{reference.dtype} is {noise.mean:.2g})",
        f"mean {max(wrong.values()):.2g}",
        "compare the training arguments with the release (CK701, CK702)"
        if all_ranks
        else "report it with the parallel sizes and the megatron-core version: the other ranks are within the limit",
        file=subject.path,
        rank=None if all_ranks else ranks_named(wrong),
    )
