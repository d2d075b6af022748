"""CK719, CK721, CK724, CK746: the options of a launch: their names, combinations, and requirements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from ckptkit.converters.config.values import language_part
from ckptkit.verify.core.check import CheckResult, check
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

# Letters that may differ in a name shorter than _LONG, and in a longer one; shorter names than _MIN are not compared.
_FEW, _MANY, _LONG, _MIN = 1, 2, len("ckpt-step"), 4
_MAX_NAMES = 2_000
_FREE = re.compile(  # mappings with names of other programs, or of the user
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
def text_sound(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Faults of the text, such as line continuations, and names one or two letters from one of a known release."""
    job = _job(subject)
    result.compared(len(job.text.words) + 1 + sum(not name.startswith("-") for name in job.written))
    yield from job.text.issues
    names = job.stack.names()
    known, seen = names.keys() | OPTIONS | engine_settings(), set[str]()
    if len(job.written) > _MAX_NAMES:
        result.note(f"only the first {_MAX_NAMES} of {len(job.written)} options were checked for misspellings")
    for name, word in islice(job.written.items(), _MAX_NAMES):
        for part in _parts(name):
            bare = part.strip("-")
            if part in seen or part in known or len(bare) < _MIN:
                continue
            seen.add(part)
            if (meant := nearest(part, names, _FEW if len(bare) < _LONG else _MANY)) is not None:
                actual = f"{name if part == name else f'{part} in {name}'} at {word.place} is an unknown name"
                hint = f"write {meant}, a name of {names[meant]}: {job.stack.unknown}"
                yield Issue(f"the known name {meant}", actual, hint, file=word.file, severity="warning")


def _parts(name: str) -> Iterator[str]:
    """An option, except vLLM's, which have no list; or the parts of a key, up to a mapping with free names."""
    if name.startswith("-"):
        yield from () if name.startswith("--vllm-") else (name,)
        return
    for part in name.split("."):
        if _FREE.search(part):
            return
        if _NAME.fullmatch(part):
            yield part


def _combinations(subject: Subject) -> tuple[Issue, ...]:
    """The conflicting options. Raises NotApplicable for a launch without known rules."""
    if (issues := job_of(subject).combinations) is None:
        known = "slime, miles, ROLL and verl's main_ppo"
        raise NotApplicable(f"ckptkit knows conflicts of options only for launches of {known}")
    return issues


@check("CK746", applies_to=_combinations)
def options_go_together(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Batch sizes, rollouts of a resumed run, adapters, and conflicts that a trainer only logs."""
    result.compared()
    yield from _combinations(subject)


# Without context parallelism. Source: Transformer Engine's `get_attention_backend`; `local` is Megatron's own.
_UNSPLIT = ("unfused", "local")


def _described(subject: Subject) -> Arguments:
    """The arguments of a launch that describes its model. Raises NotApplicable for any other."""
    given = job_of(subject).arguments
    if not given.describes_model:
        raise NotApplicable("the launch has no model arguments")
    return given


@check("CK719", applies_to=_described)
def switches_alike(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Dropout, fp16, the attention backend under context parallelism, and a router's dtype and order."""
    given = _described(subject)
    yield from (*_dropout(given), *_precision(given, subject), *_attention(given), *_experts(given))
    result.compared(6)


def _warning(given: Arguments, name: str, expected: str, actual: str, hint: str) -> Issue:
    value = given.get(name)
    where = f"at {value.where}" if value.word else "by default"
    return Issue(expected, f"{actual} ({where})", hint, file=value.file, severity="warning")


def _dropout(given: Arguments) -> Iterator[Issue]:
    for name in ("attention_dropout", "hidden_dropout"):
        if value := given.value(name, 0.1):
            hint = f"pass --{name.replace('_', '-')} 0.0, unless training needs dropout"
            yield _warning(given, name, f"{name} = 0.0, as in generation", f"{name} = {value}", hint)


def _precision(given: Arguments, subject: Subject) -> Iterator[Issue]:
    root = job_of(subject).hf
    config = engine_config(root) if root else {}
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, dict))
    dtype = next((one for part in parts for key in ("dtype", "torch_dtype") if (one := part.get(key))), None)
    if given.value("fp16") and dtype == "bfloat16":
        hint = "leave out --fp16: values beyond 65504 become infinite"
        yield _warning(given, "fp16", "dtype bfloat16, as in config.json", "dtype float16", hint)


def _attention(given: Arguments) -> Iterator[Issue]:
    backend, ranks = given.value("attention_backend", "auto"), given.value("context_parallel_size", 1) or 1
    if backend in _UNSPLIT and ranks > 1:
        actual = f"attention_backend = {backend} with context_parallel_size = {ranks}"
        hint = "choose flash or fused, or --context-parallel-size 1"
        yield _warning(given, "attention_backend", "flash, fused or auto with context parallelism", actual, hint)


def _experts(given: Arguments) -> Iterator[Issue]:
    if not given.value("num_experts", 0) or given.anything:
        return
    if (dtype := given.value("moe_router_dtype", "nothing")) not in (None, "fp32", "fp64"):
        hint = "pass --moe-router-dtype fp32: in bfloat16, close scores choose other experts than in the engine"
        yield _warning(given, "moe_router_dtype", "moe_router_dtype = fp32", f"moe_router_dtype = {dtype}", hint)
    if given.lacks("moe_permute_fusion"):
        # Source: megatron-core `moe_utils.unpermute`, which calls scatter_add_, and torch's list of nondeterministic
        # functions on CUDA. The size of the effect was not measured.
        hint = "pass --moe-permute-fusion: without it Megatron adds experts in an order that changes from run to run"
        yield _warning(given, "moe_permute_fusion", "--moe-permute-fusion", "moe_permute_fusion = False", hint)


_TEMPLATE, _STOPS = "--apply-chat-template", "--rollout-stop-token-ids"  # of slime and miles: `utils/arguments.py`


def _asked(subject: Subject) -> tuple[Word | None, list[Word]]:
    """The word that requires a template, and the stop ids. Raises NotApplicable for a launch without both."""
    engine_directory(subject)
    options = options_of(job_of(subject).text.words)
    template, stops = last(options, _TEMPLATE), last(options, _STOPS)
    ids = [word for word in stops.values if not isinstance(word, UnresolvedWord)] if stops else []
    if template is None and not ids:
        raise NotApplicable(f"the launch has neither {_TEMPLATE} nor {_STOPS}")
    return template.word if template else None, ids


@check("CK724", applies_to=_asked)
def template_there(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Compares --apply-chat-template with the templates of --hf-checkpoint, and stop ids with its vocabulary."""
    template, ids = _asked(subject)
    root = engine_directory(subject)
    files = SideFiles(root)
    result.compared(len(ids) + (template is not None))
    if template is not None and files.has_tokenizer and not files.templates:
        expected = f"a chat template, since {template.place} has {_TEMPLATE}"
        actual = "no template in chat_template.jinja, tokenizer_config.json or chat_template.json"
        hint = f"pass the instruct release as --hf-checkpoint, copy its chat_template.jinja, or leave out {_TEMPLATE}"
        yield Issue(expected, actual, hint, file=root)
    vocabulary = language_part(engine_config(root)).get("vocab_size")
    for word in ids:
        if not word.text.isdecimal() or (isinstance(vocabulary, int) and int(word.text) >= vocabulary):
            expected = f"token ids below vocab_size {vocabulary} of config.json"
            hint = "take the ids from eos_token_id of generation_config.json"
            yield Issue(expected, f"{_STOPS} {word.text} (at {word.place})", hint, file=root)
