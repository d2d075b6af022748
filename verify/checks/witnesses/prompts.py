"""Prompts that a training job recorded, held against the checkpoint's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

from verify.check import Tally, Unable, check
from verify.checks.witnesses.rollout import needs_rollout
from verify.evidence.side_files import SideFiles
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.report import Severity
from verify.witnesses.rollouts.job import TWICE_SPECIAL, UNFINISHED, Rendering
from verify.witnesses.rollouts.run import home_of, prompts_of, run_sglang_templates, run_templates


def needs_prompts(subject: Subject) -> str | None:
    """For checks of recorded prompts, which the trainer's own files do not have."""
    if (reason := needs_rollout(subject)) is not None:
        return reason
    return None if subject.once(prompts_of) else "the file of --rollout-data has no prompts that tokens can tell"


@check(
    "CK603",
    "recorded prompts are what the chat template renders",
    stage="behaviour",
    needs=("sound headers",),
    unless=needs_prompts,
    rationale="A template or tokenizer other than the one the model was trained with gives fluent answers to another "
    "question. About 0.8 nats a token for an instruct model's own answers is its mark.",
    fix="Copy tokenizer and chat template from the release, and give the job's --apply-chat-template-kwargs to both "
    "sides. Where only SGLang differs, send token ids instead of messages.",
)
def same_prompts(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Prompts through the checkpoint's tokenizer, messages through its chat template too; tokens must be equal."""
    prompts, path, home = subject.once(prompts_of), subject.options.rollout_data, home_of(subject)
    files = SideFiles(home)
    if not files.has_vocabulary and files.sentencepiece is None:
        raise Unable(f"{home} has no tokenizer to render the recorded prompts with")
    renderings = run_templates(subject)
    tally.compared(0, len(renderings))
    tally.facts["prompts of the rollout"] = [
        f"{len(prompts)} different ones rendered by transformers {version('transformers')}",
        *_assumed(renderings),
    ]
    tally.tell("recorded prompts compared with transformers")
    in_sglang = _in_sglang(subject, tally)
    for found in [one for one in renderings if one.refused][:1]:
        yield Issue(
            "messages that the chat template takes",
            f"it refuses those of sample {found.index}: {found.refused}",
            "the prompt was rendered by another template: copy it from the release",
            file=path,
        )
    others = [one for one in renderings if one.at is not None and not _is_equal(in_sglang.get(one.index))]
    for found in others[:1]:
        yield _other_tokens(found, f"; {len(others)} of {len(renderings)} prompts differ", "error", subject)
    yield from _seldom_meant(renderings, subject)
    equal = {one.index for one in renderings if _is_equal(one) and not one.assumed}
    for found in [one for one in in_sglang.values() if one.index in equal and not _is_equal(one)][:1]:
        yield _only_in_sglang(found, subject)


def _is_equal(found: Rendering | None) -> bool:
    return found is not None and found.at is None and not found.refused


def _in_sglang(subject: Subject, tally: Tally) -> Mapping[int, Rendering]:
    try:
        found = run_sglang_templates(subject)
    except Unable as reason:
        tally.note(f"recorded prompts were compared with transformers' rendering alone, not with SGLang's: {reason}")
        return {}
    if found:
        same = sum(map(_is_equal, found))
        tally.facts["prompts of the rollout"].append(
            f"{len(found)} of messages rendered by SGLang's chat endpoint too, {same} of them with the recorded tokens"
        )
    return {one.index: one for one in found}


def _assumed(renderings: Sequence[Rendering]) -> list[str]:
    assumed = {one.assumed: one.index for one in reversed(renderings) if one.assumed}
    lines = [f"equal with {what}, which the file does not record (sample {index})" for what, index in assumed.items()]
    if bare := [one.index for one in renderings if one.bare]:
        lines.append(
            f"{len(bare)} are text without any of the template's special tokens (first sample {bare[0]}): "
            "was --apply-chat-template left out?"
        )
    return lines


def _seldom_meant(renderings: Sequence[Rendering], subject: Subject) -> Iterator[Issue]:
    """Prompts that can be explained, and that slime and miles themselves would not make."""
    ways = {
        UNFINISHED: "they end before the header of the model's own turn, which the template adds when it is asked to",
        TWICE_SPECIAL: "the tokenizer added special tokens, and a template that writes them too gives them twice",
    }
    for way, what in ways.items():
        if found := [one.index for one in renderings if one.assumed == way]:
            yield Issue(
                "prompts made as slime and miles make them",
                f"{len(found)} of {len(renderings)}, first sample {found[0]}, are equal with {way} only",
                what,
                file=subject.options.rollout_data,
                severity="warning",
                count=len(found),
            )


def _other_tokens(found: Rendering, where: str, severity: Severity, subject: Subject) -> Issue:
    return Issue(
        f"the tokens that were recorded for sample {found.index}: {found.recorded} behind {found.before!r}",
        f"{found.rendered} at token {found.at}{where}",
        "compare tokenizer and chat template with the release, and the job's --apply-chat-template-kwargs",
        file=subject.options.rollout_data,
        severity=severity,
    )


def _only_in_sglang(found: Rendering, subject: Subject) -> Issue:
    if found.at is not None:
        return _other_tokens(found, " in SGLang's chat endpoint", "warning", subject)
    return Issue(
        "messages that SGLang's chat endpoint takes, as the chat template does",
        f"it refuses those of sample {found.index}: {found.refused}",
        "send SGLang token ids instead of messages",
        file=subject.options.rollout_data,
        severity="warning",
    )
