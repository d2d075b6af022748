"""Renders recorded prompts again in transformers: `python -m ckptkit.verify.witnesses.rollouts.process JOB.json`.

Messages are rendered by the tokenizer's own chat template, which transformers runs in a sandbox; text is tokenized as
in slime and miles, without further special tokens. No code of the checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase, run_job
from ckptkit.verify.witnesses.rollouts.recorded import RecordedSample
from ckptkit.verify.witnesses.rollouts.run import RenderedPrompts, Rendering, RolloutJob

_BEFORE = 12  # tokens of context before the first difference
# Options that a launch may give to the template and no file records (slime's --apply-chat-template-kwargs).
_UNRECORDED: tuple[Mapping[str, Any], ...] = (
    {},
    *({name: on} for name in ("enable_thinking", "thinking") for on in (False, True)),
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
)


def run(job: RolloutJob, phases: ExitReport) -> RenderedPrompts:
    """Renders prompts. Raises CkptkitError for messages without a template."""
    phases.enter(Phase("loading the tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(job.home, trust_remote_code=False)
    if not tokenizer.chat_template and any(not isinstance(one.prompt, str) for one in job.samples):
        raise CkptkitError(f"{job.home} has no chat template", "copy it from the release")
    phases.enter(Phase("rendering prompts"))
    return RenderedPrompts([_rendering(tokenizer, one) for one in job.samples])


def _rendering(tokenizer: Any, sample: RecordedSample) -> Rendering:
    try:
        plain = _rendered(tokenizer, sample, {})
    except TemplateError as error:
        return Rendering(sample.index, refused=words_of(error))
    for more in ({}, {"add_special_tokens": True}) if isinstance(sample.prompt, str) else _UNRECORDED:
        try:
            if _rendered(tokenizer, sample, more) == sample.prompt_tokens:
                return Rendering(sample.index, assumed=", ".join(f"{key}={value}" for key, value in more.items()))
        except (TemplateError, ValueError):
            continue  # a template may refuse an option, and transformers a last message that cannot be continued
    return Rendering(sample.index, different=_difference(tokenizer, sample.prompt_tokens, plain))


def _rendered(tokenizer: Any, sample: RecordedSample, more: Mapping[str, Any]) -> list[int]:
    """The token ids; `more` are options of the template, or of the encoding of a prompt that is text."""
    if isinstance(sample.prompt, str):
        return [*tokenizer.encode(sample.prompt, **{"add_special_tokens": False, **more})]
    options = {"add_generation_prompt": True, **sample.options, **more}
    text = tokenizer.apply_chat_template(sample.prompt, tokenize=False, **options)
    return [*tokenizer.encode(text, add_special_tokens=False)]


def _difference(tokenizer: Any, recorded: Sequence[int], rendered: Sequence[int]) -> str:
    pairs = enumerate(zip(rendered, recorded, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), min(len(rendered), len(recorded)))
    before = tokenizer.decode(list(recorded[max(0, at - _BEFORE) : at]))[-200:]
    ends = [
        f"{tokenizer.decode([ids[at]])!r} ({ids[at]})" if at < len(ids) else "the end" for ids in (rendered, recorded)
    ]
    return f"{ends[0]} at token {at}, recorded {ends[1]} after {before!r}"


if __name__ == "__main__":
    run_job(RolloutJob, run)
