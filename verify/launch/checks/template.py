"""CK724: what a launch asks of the tokenizer of --hf-checkpoint: a chat template, and tokens to stop at."""

from __future__ import annotations

from collections.abc import Iterator

from converters.config.values import language_part
from verify.check import Skip, Tally, check
from verify.evidence.side_files import SideFiles
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import engine_config, engine_of, job_of, unless_skipped
from verify.launch.options.argv import last, options_of
from verify.launch.words import UnresolvedWord, Word

# Options of slime and miles; Source: their `utils/arguments.py`.
_TEMPLATE, _STOPS = "--apply-chat-template", "--rollout-stop-token-ids"


def _asked(subject: Subject) -> tuple[Word | None, list[Word]]:
    """The word that asks for a template, and the ids to stop at. Raises Skip where a launch asks for neither."""
    engine_of(subject)
    options = options_of(job_of(subject).text.words)
    template, stops = last(options, _TEMPLATE), last(options, _STOPS)
    ids = [word for word in stops.values if not isinstance(word, UnresolvedWord)] if stops else []
    if template is None and not ids:
        raise Skip(f"the launch has neither {_TEMPLATE} nor {_STOPS}")
    return template.word if template else None, ids


@check(
    "CK724",
    "the tokenizer has the chat template and the stop tokens that the launch asks for",
    stage="launch",
    rationale="Without a template the first rollout stops the job, after the GPUs were booked; with the template or "
    "the stop tokens of another model, responses never end.",
    fix="Give the instruct release as --hf-checkpoint, or add its chat_template.jinja; take stop ids from its config.",
    unless=unless_skipped(_asked),
)
def template_there(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """`--apply-chat-template` against the templates of --hf-checkpoint, and stop ids against its vocabulary."""
    template, ids = _asked(subject)
    root = engine_of(subject)
    files = SideFiles(root)
    tally.compared(0, len(ids) + (template is not None))
    if template is not None and files.has_tokenizer and not files.templates:
        yield Issue(
            f"a chat template, since {template.place} has {_TEMPLATE}",
            "none in chat_template.jinja, tokenizer_config.json or chat_template.json",
            "a base model has none: give the instruct release, copy its chat_template.jinja, or leave the option out",
            file=root,
        )
    config = engine_config(root)
    vocabulary = language_part(config).get("vocab_size")
    for word in ids:
        known = word.text.isdecimal() and (not isinstance(vocabulary, int) or int(word.text) < vocabulary)
        if not known:
            yield Issue(
                f"token ids below the vocab_size of config.json, {vocabulary}",
                f"{_STOPS} {word.text}, at {word.place}",
                "take the ids from eos_token_id of generation_config.json",
                file=root,
            )
