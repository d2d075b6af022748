"""Renders recorded prompts as a trainer does: `python -m verify.witnesses.rollouts.template JOB.json`.

Messages go through the tokenizer's own chat template, which transformers runs in a sandbox; text is tokenized as slime
and miles do it, without further special tokens. No code that comes with the checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from ckptkit.core.errors import CkptkitError, words_of
from verify.witnesses.process.entry import run_job
from verify.witnesses.process.exit_report import Phase, PhaseLog
from verify.witnesses.rollouts.job import Prompt, PromptJob, Rendering, Renderings

_BEFORE = 12  # tokens of context in front of the first difference
# What a launch may have given to the template and no file records (slime's --apply-chat-template-kwargs).
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
    special = _special_in_template(tokenizer)
    return Renderings([_rendering(tokenizer, one, special) for one in job.prompts])


def _rendering(tokenizer: Any, asked: Prompt, special: frozenset[int]) -> Rendering:
    try:
        plain = _rendered(tokenizer, asked, {})
    except TemplateError as error:
        return Rendering(asked.index, refused=words_of(error))
    bare = bool(special) and isinstance(asked.prompt, str) and special.isdisjoint(asked.tokens)
    if plain == list(asked.tokens):
        return Rendering(asked.index, bare=bare)
    assumed = next(
        (assumption for assumption, tokens in _assuming(tokenizer, asked) if tokens == list(asked.tokens)), ""
    )
    if assumed:
        return Rendering(asked.index, assumed=assumed, bare=bare)
    return difference(tokenizer, asked, plain)


def _rendered(tokenizer: Any, asked: Prompt, more: Mapping[str, Any]) -> list[int]:
    """The token ids, those of text with `more` for its encoding."""
    if isinstance(asked.prompt, str):
        return [*tokenizer.encode(asked.prompt, **{"add_special_tokens": False, **more})]
    options = {"add_generation_prompt": True, **asked.options, **more}
    text = tokenizer.apply_chat_template(list(asked.prompt), tokenize=False, **options)
    return [*tokenizer.encode(text, add_special_tokens=False)]


def _assuming(tokenizer: Any, asked: Prompt) -> Iterator[tuple[str, list[int]]]:
    """What was assumed, and the tokens that follow from it."""
    ways = ({"add_special_tokens": True},) if isinstance(asked.prompt, str) else _UNRECORDED
    for more in ways:
        try:
            yield ", ".join(f"{key}={value}" for key, value in more.items()), _rendered(tokenizer, asked, more)
        except (TemplateError, ValueError):
            continue  # a template may refuse an option, and transformers a last message that cannot be continued


def difference(tokenizer: Any, asked: Prompt, rendered: Sequence[int]) -> Rendering:
    """Where `rendered` first differs from the recorded tokens."""
    pairs = zip(rendered, asked.tokens, strict=False)
    at = next(
        (place for place, (one, other) in enumerate(pairs) if one != other), min(len(rendered), len(asked.tokens))
    )
    before = tokenizer.decode(list(asked.tokens[max(0, at - _BEFORE) : at]))
    return Rendering(
        asked.index, at, _token(tokenizer, rendered, at), _token(tokenizer, asked.tokens, at), before[-200:]
    )


def _token(tokenizer: Any, tokens: Sequence[int], at: int) -> str:
    return f"{tokenizer.decode([tokens[at]])!r} ({tokens[at]})" if at < len(tokens) else "the end"


def _special_in_template(tokenizer: Any) -> frozenset[int]:
    """The special tokens that the template writes around a user's message."""
    if not tokenizer.chat_template:
        return frozenset()
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
    except TemplateError:
        return frozenset()  # it takes other messages only; those of the file are judged by themselves
    return frozenset(tokenizer.encode(text, add_special_tokens=False)) & frozenset(tokenizer.added_tokens_decoder)


if __name__ == "__main__":
    run_job(PromptJob, run)
