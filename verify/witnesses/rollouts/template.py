"""Renders recorded prompts as a trainer does: `python -m verify.witnesses.rollouts.template JOB.json`.

Messages go through the tokenizer's own chat template, which transformers runs in a sandbox; text is tokenized as slime
and miles do it, without further special tokens. No code that comes with the checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from ckptkit.core.errors import CkptkitError, words_of
from verify.witnesses.process.entry import run_job
from verify.witnesses.process.exit_report import Phase, PhaseLog
from verify.witnesses.rollouts.job import Prompt, PromptJob, Rendering, Renderings

_BEFORE = 12  # tokens of context before the first difference
# Options that a launch may give to the template and no file records (slime's --apply-chat-template-kwargs).
_UNRECORDED: tuple[Mapping[str, Any], ...] = (
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": True},
    {"thinking": False},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
)


def run(job: PromptJob, phases: PhaseLog) -> Renderings:
    """Renders every prompt. Raises CkptkitError for messages where the tokenizer has no chat template."""
    phases.enter(Phase("loading the tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(job.home, trust_remote_code=False)
    if not tokenizer.chat_template and any(not isinstance(one.prompt, str) for one in job.prompts):
        raise CkptkitError(f"{job.home} has no chat template", "copy it from the release")
    phases.enter(Phase("rendering prompts"))
    return Renderings([_rendering(tokenizer, one) for one in job.prompts])


def _rendering(tokenizer: Any, asked: Prompt) -> Rendering:
    try:
        plain = _rendered(tokenizer, asked, {})
    except TemplateError as error:
        return Rendering(asked.index, refused=words_of(error))
    if plain == [*asked.tokens]:
        return Rendering(asked.index)
    for more in [{"add_special_tokens": True}] if isinstance(asked.prompt, str) else _UNRECORDED:
        try:
            if _rendered(tokenizer, asked, more) == [*asked.tokens]:
                return Rendering(asked.index, assumed=", ".join(f"{key}={value}" for key, value in more.items()))
        except (TemplateError, ValueError):
            continue  # a template may refuse an option, and transformers a last message that cannot be continued
    return Rendering(asked.index, different=_difference(tokenizer, asked.tokens, plain))


def _rendered(tokenizer: Any, asked: Prompt, more: Mapping[str, Any]) -> list[int]:
    """The token ids; `more` are options of the template, or of the encoding of a prompt that is text."""
    if isinstance(asked.prompt, str):
        return [*tokenizer.encode(asked.prompt, **{"add_special_tokens": False, **more})]
    options = {"add_generation_prompt": True, **asked.options, **more}
    text = tokenizer.apply_chat_template(list(asked.prompt), tokenize=False, **options)
    return [*tokenizer.encode(text, add_special_tokens=False)]


def _difference(tokenizer: Any, recorded: Sequence[int], rendered: Sequence[int]) -> str:
    pairs = enumerate(zip(rendered, recorded, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), min(len(rendered), len(recorded)))
    before = tokenizer.decode(list(recorded[max(0, at - _BEFORE) : at]))[-200:]
    now, then = (
        f"{tokenizer.decode([ids[at]])!r} ({ids[at]})" if at < len(ids) else "the end" for ids in (rendered, recorded)
    )
    return f"{now} at token {at}, recorded {then} after {before!r}"


if __name__ == "__main__":
    run_job(PromptJob, run)
