"""CK745: the engine of a launch has what it drafts with."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.converters.config.values import class_of, language_part
from ckptkit.converters.draft import FUSION, is_draft, sizes_of, target_of
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import require_own_files
from ckptkit.formats.hf.reader import read_config
from ckptkit.quant.engines.drafts import registries
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.folding import LAYER
from ckptkit.verify.launch.checks.engine import engine_config, job_of
from ckptkit.verify.launch.options.speculative import Speculation
from ckptkit.verify.launch.words import UnresolvedWord
from ckptkit.verify.quirks import quirks

# What configs call the number of multi-token prediction layers.
_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_modules", "n_predict")
_NAMES = re.compile(r"(?:.*\.)?mtp(?:_layers|_block)?\.")
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def _speculation(subject: Subject) -> Speculation:
    """What the launch says of drafting. Raises NotApplicable for one that does not draft."""
    job = job_of(subject)
    if job.arguments.value("debug_train_only"):
        raise NotApplicable("the launch starts no engine")
    if job.speculation is None:
        raise NotApplicable("the launch asks for no speculative decoding")
    anything = any(isinstance(word, UnresolvedWord) and word.anything for word in job.text.words)
    return replace(job.speculation, known=job.speculation.known and not anything)


@check("CK745", applies_to=_speculation)
def draft_there(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """A draft model where the method needs one, of a class and sizes that go with method and served model.

    Without one, layers of the model's own.

    Source: SGLang `arg_groups/speculative_hook.py`, `configs/model_config.py` (_config_draft_model); vLLM
    `config/speculative.py` (SpeculativeConfig).
    """
    found = _speculation(subject)
    tally.compared()
    if found.draft is not None:
        draft = Path(found.draft)
        # For vLLM also the name of a method, or of a module.
        is_name = not draft.is_absolute() and (found.server == "vllm" or _HUB.fullmatch(str(draft)))
        if draft.is_dir():
            yield from _model(found, draft, subject) if found.known else ()
        elif not is_name and "://" not in str(draft):
            yield Issue(f"the draft model {draft}", "no such directory", "check the path", file=draft)
    elif found.known:
        yield from _tokens(found, None)
        yield from _without(found, subject)


def _without(found: Speculation, subject: Subject) -> Iterator[Issue]:
    """A method without a draft model of its own."""
    where, registry = f"{found.method}, at {found.asked_by}", registries()[found.server]
    if found.method in registry.needs_model:
        option = '"model" of the draft' if found.server == "vllm" else "a draft model"
        if found.server == "sglang" and job_of(subject).stack.one_model:
            option = "--sglang-speculative-draft-model-path"
        hint = "give the draft model that was trained for it"
        yield Issue(f"{option} with {found.method}", f"{where}, without it", hint)
        return
    root = job_of(subject).hf
    if found.method.upper() == "DSPARK" and root is not None and (config := engine_config(root)):
        if not any(key.startswith("dspark_") for key in (*config, *language_part(config))):
            actual = f"{where}, with {root}: its config.json speaks of none"
            yield Issue("a model with layers of DSpark, or a draft model", actual, "give the draft model", file=root)
        return
    if found.method not in registry.of_layers:
        return
    config = engine_config(root) if root else {}
    if root is None or not config:
        raise CannotCheck("there is no config.json of the engine's model that can be read", "CK714", "CK101")
    stored = _stored(subject, root, config)
    if stored is None and any(known.is_about("", config) for known in quirks("transformers", "unstated")):
        raise CannotCheck(
            "only the names of the weights tell whether this model has such layers, and there are none", "CK104"
        )
    if stored is False or (stored is None and not _stated(config)):
        expected = "a model with multi-token prediction layers, or a draft model"
        lacks = "its files hold none" if stored is False else "its config.json speaks of none"
        actual = f"{where}, with {root}: {lacks}"
        yield Issue(expected, actual, "give a draft model, or leave speculative decoding out", file=root)


def _model(found: Speculation, draft: Path, subject: Subject) -> Iterator[Issue]:
    """A draft model against the method and the served model, by config.json and the names of its tensors."""
    require_own_files(draft)
    try:
        config = read_config(draft)
        own = sizes_of(config)
        fused = own.version != 3 or own.needs(FUSION)
    except CkptkitError:
        return  # which `verify DRAFT` judges
    # Engines hand on states of three layers for EAGLE3 and of one for EAGLE, whatever the draft model reads.
    named = {"EAGLE": 1, "EAGLE3": 3}.get(found.method.upper(), 0)
    if named and own.version and fused and named != own.version:
        right = "EAGLE3" if own.version == 3 else "EAGLE"
        expected, actual = f"{right}, for a draft model of {right}", f"{found.method}, at {found.asked_by}"
        yield Issue(expected, actual, "no draft token is accepted: name the method of the draft model", file=draft)
    else:
        layers = _stated(config) or bool(_stored(subject, draft, config))
        yield from _class(found, draft, config, _names(subject, draft), layers)
    yield from _tokens(found, config)
    root = job_of(subject).hf
    if root is not None and root != draft:
        yield from _sizes(found, draft, config, engine_config(root))


def _class(
    found: Speculation, draft: Path, config: Mapping[str, Any], names: Collection[str], layers: bool
) -> Iterator[Issue]:
    """A draft of a class that does not go with the method.

    `names`: of its tensors; empty where they cannot be told. `layers`: it has multi-token prediction layers. An error
    for a language model, a warning where the engine may know more than is known here.
    """
    method, stated, sglang = found.method, class_of(config), found.server == "sglang"
    registry = registries()[found.server]
    nested, expected = config.get("speculators_model_type") is not None, f"a draft model for {method}"
    if sglang and nested and config.get("model_type") is None:
        actual = "config.json of speculators, without model_type: SGLang, which reads it by transformers, stops"
        yield Issue(expected, actual, "serve it with vLLM, or convert it for SGLang", file=draft, severity="warning")
    if not stated or nested or method not in registry.of_class or (layers and method != "EAGLE3"):
        return
    other = next((one for one in ("dspark", "dflash") if one in stated.lower() and one != method.lower()), None)
    is_language_model = not is_draft(config) and all(stated not in one.drafts for one in registries().values())
    if is_language_model and names and {FUSION, f"model.{FUSION}"}.isdisjoint(names):
        actual = f"{stated}, a language model, whose files hold no {FUSION}"
        hint = f"give a model that was trained for it, or name {'STANDALONE' if sglang else 'draft_model'}"
        yield Issue(expected, actual, hint, file=draft)
    elif is_language_model and sglang and (names or method == "EAGLE3"):
        actual = f"{stated}, the class of a language model, which {registry.release} loads in place of a draft class"
        named = f"{stated}Eagle{'3' if method == 'EAGLE3' else ''}"
        hint = f"name the draft class in architectures, as {named} for {stated}"
        yield Issue(expected, actual, hint, file=draft, severity="warning")
    elif other:
        actual, hint = f"{stated}, the class of a draft model for {other}", f"name {other} as the method"
        yield Issue(expected, actual, hint, file=draft, severity="warning")


def _sizes(found: Speculation, draft: Path, config: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[Issue]:
    """Another width than the states of the target have; another vocabulary. Nothing for sizes that are not stated."""
    try:
        own, other = sizes_of(config), target_of(target)
        wide = own.version and own.target_hidden != other.hidden
    except CkptkitError:
        return
    if wide:
        expected = f"a draft model for states of width {other.hidden}, as the served model has them"
        yield Issue(expected, f"{own.target_hidden}", "give the draft that was trained for this model", file=draft)
    vocabulary = (own.config if own.version else language_part(config)).get("vocab_size")
    if type(vocabulary) is not int or vocabulary == other.vocabulary or found.mixed:
        return
    expected, actual = f"a draft model with vocab_size {other.vocabulary}, as the served model", f"{vocabulary}"
    engine = {"STANDALONE": "SGLang", "draft_model": "vLLM"}.get(found.method)
    if own.version:
        hint = "tokens of another tokenizer are not accepted, or lie beyond the embedding: check the draft's target"
        yield Issue(expected, actual, hint, file=draft, severity="warning")
    elif engine and not is_draft(config):
        yield Issue(expected, actual, f"{engine} stops: give a draft of the same tokenizer", file=draft)


def _tokens(found: Speculation, config: Mapping[str, Any] | None) -> Iterator[Issue]:
    """No number of tokens for vLLM, which takes it from `n_predict` of a draft model alone."""
    if found.server != "vllm" or found.tokens or found.method == "suffix":
        return
    expected, actual = "num_speculative_tokens", f"{found.method}, at {found.asked_by}, without it"
    hint = "stops: say how many tokens to draft"
    if found.draft is None:
        yield Issue(expected, actual, f"vLLM {hint}")
        return
    if config is None or found.method not in (*registries()["vllm"].of_class, "draft_model", "mtp"):
        return
    by_itself = found.method == "draft_model" and is_draft(config)
    if found.method == "mtp" or config.get("speculators_config") is not None:
        # A later release may look there.
        yield Issue(expected, actual, f"{registries()['vllm'].release} {hint}", severity="warning")
    elif config.get("n_predict") is None and not by_itself:
        yield Issue(expected, actual, f"vLLM {hint}")


def _stated(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    return any(isinstance(one.get(key), int) and one[key] > 0 for one in places for key in _KEYS)


def _names(subject: Subject, root: Path) -> list[str]:
    """The names of a model's tensors; empty where they cannot be told."""
    try:
        return list(subject.loaded.get(root, Subject(root)).hf_files.specs)
    except CkptkitError:
        return []


def _stored(subject: Subject, root: Path, config: Mapping[str, Any]) -> bool | None:
    """Whether the files hold such layers; None where their names cannot be told."""
    text = config.get("text_config")
    layers = next((one.get("num_hidden_layers") for one in (config, text or {}) if "num_hidden_layers" in one), None)
    names = _names(subject, root)
    if not names or not isinstance(layers, int):
        return None
    numbered = (match for name in names if (match := LAYER.search(name)))
    return any(_NAMES.match(name) for name in names) or any(int(match[1]) >= layers for match in numbered)
