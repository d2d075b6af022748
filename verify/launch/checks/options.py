"""CK719, CK721, CK724, CK746: the options of a launch: their names, their combinations, and what they ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from ckptkit.converters.config.values import language_part
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.side_files import SideFiles
from ckptkit.verify.launch.checks.engine import engine_config, engine_directory, job_of
from ckptkit.verify.launch.job import Job
from ckptkit.verify.launch.options.arguments import Arguments
from ckptkit.verify.launch.options.argv import last, options_of
from ckptkit.verify.launch.options.names import engine_settings, nearest
from ckptkit.verify.launch.options.tables import OPTIONS
from ckptkit.verify.launch.words import UnresolvedWord, Word

# Letters that may differ, in a short name and in a long one.
_FEW, _MANY, _SHORT, _SHORTEST = 1, 2, len("ckpt-step"), 4
_MAX_NAMES = 2_000
# Mappings whose names are those of another program, or the user's own.
_FREE = re.compile(
    r"kwargs|env_vars|system_envs|^envs?$|override|runtime_env|^custom|^tools?$|domain|^rewards$|tags?$|^data$|"
    r"^defaults$|^hydra$|plugin|^agent|^wandb|^swanlab|additional_configs?|^nsight|interleave|^datasets?$"
)
_NAME = re.compile(r"[A-Za-z]\w*")


def _job(subject: Subject) -> Job:
    job = job_of(subject)
    if not (job.text.words or job.text.issues or job.written):
        raise NotApplicable("no launch arguments were given")
    return job


@check("CK721", applies_to=_job)
def text_sound(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Line continuations, arrays that are set nowhere, and names that differ in a letter or two from a known one.

    The finding names the release of which the known name is (`verify/launch/options/names`).
    """
    job = _job(subject)
    tally.compared(len(job.text.words) + 1 + sum(not name.startswith("-") for name in job.written))
    yield from job.text.issues
    own = job.stack.names()
    known, seen = own.keys() | OPTIONS | engine_settings(), set[str]()
    if len(job.written) > _MAX_NAMES:
        what = f"only the first {_MAX_NAMES} were looked through for misspellings"
        tally.note(f"{len(job.written)} different options: {what}")
    for name, word in islice(job.written.items(), _MAX_NAMES):
        for part in _parts(name):
            bare = part.strip("-")
            if part in seen or part in known or len(bare) < _SHORTEST:
                continue
            seen.add(part)
            if (meant := nearest(part, own, _FEW if len(bare) < _SHORT else _MANY)) is not None:
                what = name if part == name else f"{part} in {name}"
                hint = f"write {meant}, as {own[meant]} has it: {job.stack.unknown}"
                yield Issue(meant, f"{what} is not known, at {word.place}", hint, file=word.file, severity="warning")


def _parts(name: str) -> Iterator[str]:
    """An option other than vLLM's, which have no list, or the parts of a dotted key up to a mapping with free names."""
    if name.startswith("-"):
        yield from () if name.startswith("--vllm-") else (name,)
        return
    for part in name.split("."):
        if _FREE.search(part):
            return
        if _NAME.fullmatch(part):
            yield part


def _combinations(subject: Subject) -> tuple[Issue, ...]:
    """The combinations that the stack's reader found. Raises NotApplicable where no such rule is known."""
    if (issues := job_of(subject).combinations) is None:
        known = "slime, miles, ROLL or verl's main_ppo, the launches with known combinations of options"
        raise NotApplicable(f"the launch is not one of {known}")
    return issues


@check("CK746", applies_to=_combinations)
def options_go_together(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Arithmetic of batches, rollouts of a run that resumes, adapters, and what only warns in a trainer's log."""
    tally.compared()
    yield from _combinations(subject)


# Backends of attention that do not share a sequence out over context parallel ranks.
# Source: Transformer Engine's `get_attention_backend`; `local` is Megatron's own, which has no context parallelism.
_WHOLE = ("unfused", "local")


def _described(subject: Subject) -> Arguments:
    """The arguments of a launch that says what it trains. Raises NotApplicable for any other."""
    given = job_of(subject).arguments
    if not given.describes_model:
        raise NotApplicable("the launch gives no model arguments")
    return given


@check("CK719", applies_to=_described)
def switches_alike(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Dropout, fp16, the attention backend under context parallelism, and a router's dtype and order."""
    given = _described(subject)
    yield from (*_dropout(given), *_precision(given, subject), *_attention(given), *_experts(given))
    tally.compared(6)


def _warning(given: Arguments, name: str, expected: str, actual: str, hint: str) -> Issue:
    found = given.get(name)
    where = f"at {found.where}" if found.word else "by default, as the launch does not give it"
    return Issue(expected, f"{actual}, {where}", hint, file=found.file, severity="warning")


def _dropout(given: Arguments) -> Iterator[Issue]:
    for name in ("attention_dropout", "hidden_dropout"):
        value = given.value(name, 0.1)
        if value:
            option = f"--{name.replace('_', '-')} 0.0"
            hint = f"give {option}, unless the training is meant to drop"
            yield _warning(given, name, f"{name} = 0.0, as generation has none", f"{name} = {value}", hint)


def _precision(given: Arguments, subject: Subject) -> Iterator[Issue]:
    root = job_of(subject).hf
    config = engine_config(root) if root else {}
    text = config.get("text_config")
    stated = config.get("dtype") or config.get("torch_dtype")
    stated = stated or (text.get("dtype") or text.get("torch_dtype") if isinstance(text, dict) else None)
    if given.value("fp16") and stated == "bfloat16":
        hint = "leave --fp16 out: values beyond 65504 become infinite"
        yield _warning(given, "fp16", "bfloat16, as config.json says", "float16", hint)


def _attention(given: Arguments) -> Iterator[Issue]:
    backend, ranks = given.value("attention_backend", "auto"), given.value("context_parallel_size", 1) or 1
    if backend in _WHOLE and ranks > 1:
        message = f"attention_backend = {backend} with context_parallel_size = {ranks}"
        hint = "take flash or fused, or --context-parallel-size 1"
        expected = "a backend that shares a sequence out: flash, fused or auto"
        yield _warning(given, "attention_backend", expected, message, hint)


def _experts(given: Arguments) -> Iterator[Issue]:
    if not given.value("num_experts", 0) or given.anything:
        return
    if (dtype := given.value("moe_router_dtype", "nothing")) not in (None, "fp32", "fp64"):
        actual = f"moe_router_dtype = {dtype}"
        hint = "give --moe-router-dtype fp32: near ties in bfloat16 choose other experts than the engine does"
        yield _warning(given, "moe_router_dtype", "moe_router_dtype = fp32", actual, hint)
    if given.lacks("moe_permute_fusion"):
        # Source: megatron-core `moe_utils.unpermute`, which calls scatter_add_, and torch's list of what is not
        # deterministic on CUDA. How much it comes to was not measured.
        hint = "give it: without it Megatron adds a token's experts up in an order that changes from run to run"
        yield _warning(given, "moe_permute_fusion", "--moe-permute-fusion", "moe_permute_fusion = False", hint)


# Options of slime and miles; Source: their `utils/arguments.py`.
_TEMPLATE, _STOPS = "--apply-chat-template", "--rollout-stop-token-ids"


def _asked(subject: Subject) -> tuple[Word | None, list[Word]]:
    """The word that asks for a template, and the ids to stop at.

    Raises NotApplicable where a launch asks for neither.
    """
    engine_directory(subject)
    options = options_of(job_of(subject).text.words)
    template, stops = last(options, _TEMPLATE), last(options, _STOPS)
    ids = [word for word in stops.values if not isinstance(word, UnresolvedWord)] if stops else []
    if template is None and not ids:
        raise NotApplicable(f"the launch has neither {_TEMPLATE} nor {_STOPS}")
    return template.word if template else None, ids


@check("CK724", applies_to=_asked)
def template_there(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """`--apply-chat-template` against the templates of --hf-checkpoint, and stop ids against its vocabulary."""
    template, ids = _asked(subject)
    root = engine_directory(subject)
    files = SideFiles(root)
    tally.compared(len(ids) + (template is not None))
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
