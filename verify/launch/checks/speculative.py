"""CK745: the engine of a launch has the draft model or layers that its speculative decoding requires."""

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
from ckptkit.verify.core.check import CheckResult, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.folding import LAYER
from ckptkit.verify.launch.checks.engine import engine_config, job_of
from ckptkit.verify.launch.options.speculative import Speculation
from ckptkit.verify.launch.words import UnresolvedWord
from ckptkit.verify.quirks import quirks

# Keys of the number of multi-token prediction layers.
_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_modules", "n_predict")
_NAMES = re.compile(r"(?:.*\.)?mtp(?:_layers|_block)?\.")
_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def _speculation(subject: Subject) -> Speculation:
    """The speculative decoding of the launch. Raises NotApplicable for a launch without it."""
    job = job_of(subject)
    if job.arguments.value("debug_train_only"):
        raise NotApplicable("the launch starts no engine")
    if job.speculation is None:
        raise NotApplicable("the launch has no speculative decoding")
    anything = any(isinstance(word, UnresolvedWord) and word.anything for word in job.text.words)
    return replace(job.speculation, known=job.speculation.known and not anything)


@check("CK745", applies_to=_speculation)
def draft_there(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Checks the draft model, its class and sizes, or else the model's own draft layers.

    Source: SGLang `arg_groups/speculative_hook.py`, `configs/model_config.py` (_config_draft_model); vLLM
    `config/speculative.py` (SpeculativeConfig).
    """
    speculation = _speculation(subject)
    result.compared()
    if speculation.draft is not None:
        draft = Path(speculation.draft)
        # vLLM also accepts the name of a method, or of a module.
        is_name = not draft.is_absolute() and (speculation.server == "vllm" or _HUB.fullmatch(str(draft)))
        if draft.is_dir():
            yield from _draft_model(speculation, draft, subject) if speculation.known else ()
        elif not is_name and "://" not in str(draft):
            yield Issue(f"the draft model {draft}", "no such directory", "check the path", file=draft)
    elif speculation.known:
        yield from _tokens(speculation, None)
        yield from _draft_layers(speculation, subject)


def _draft_layers(speculation: Speculation, subject: Subject) -> Iterator[Issue]:
    """A method without a draft model."""
    method, server = speculation.method, speculation.server
    where, registry = f"{method} at {speculation.asked_by}", registries()[server]
    if method in registry.needs_model:
        option = 'a "model" for the draft' if server == "vllm" else "a draft model"
        if server == "sglang" and job_of(subject).stack.one_model:
            option = "--sglang-speculative-draft-model-path"
        yield Issue(f"{option} with {method}", f"{where} has no draft model", "pass the draft model of this model")
        return
    root = job_of(subject).hf
    if method.upper() == "DSPARK" and root is not None and (config := engine_config(root)):
        if not any(key.startswith("dspark_") for key in (*config, *language_part(config))):
            actual = f"{where}, but config.json of {root} has no DSpark layers"
            yield Issue("a model with DSpark layers, or a draft model", actual, "pass the draft model", file=root)
        return
    if method not in registry.of_layers:
        return
    config = engine_config(root) if root else {}
    if root is None or not config:
        raise CannotCheck("the engine's model has no readable config.json", "CK714", "CK101")
    has_layers = _has_layers(subject, root, config)
    if has_layers is None and any(known.is_about("", config) for known in quirks("transformers", "unstated")):
        raise CannotCheck("without weights, nothing shows whether the model has draft layers", "CK104")
    if has_layers is False or (has_layers is None and not _declares_layers(config)):
        expected = "a model with multi-token prediction layers, or a draft model"
        actual = f"{where}, but {'config.json' if has_layers is None else 'the weights'} of {root} has no such layers"
        yield Issue(expected, actual, "pass a draft model, or leave out speculative decoding", file=root)


def _draft_model(speculation: Speculation, draft: Path, subject: Subject) -> Iterator[Issue]:
    """Compares a draft model with the method and the served model, by config.json and the names of its tensors."""
    require_own_files(draft)
    try:
        config = read_config(draft)
        sizes = sizes_of(config)
        is_fused = sizes.version != 3 or sizes.needs(FUSION)
    except CkptkitError:
        return  # `verify DRAFT` reports it
    # Engines pass hidden states of three layers for EAGLE3 and of one for EAGLE, for any draft model.
    version = {"EAGLE": 1, "EAGLE3": 3}.get(speculation.method.upper(), 0)
    if version and sizes.version and is_fused and version != sizes.version:
        method = "EAGLE3" if sizes.version == 3 else "EAGLE"
        expected = f"the method {method}, since the draft model is for {method}"
        actual = f"the method {speculation.method}, at {speculation.asked_by}"
        yield Issue(expected, actual, f"choose {method}: with another method no draft token is accepted", file=draft)
    else:
        has_layers = _declares_layers(config) or bool(_has_layers(subject, draft, config))
        yield from _class(speculation, draft, config, _names(subject, draft), has_layers)
    yield from _tokens(speculation, config)
    root = job_of(subject).hf
    if root is not None and root != draft:
        yield from _sizes(speculation, draft, config, engine_config(root))


def _class(
    speculation: Speculation, draft: Path, config: Mapping[str, Any], names: Collection[str], has_layers: bool
) -> Iterator[Issue]:
    """A draft of a class that does not match the method: an error for a language model, else a warning.

    `names` of tensors are empty if unknown. `has_layers`: it has multi-token prediction layers.
    """
    method, class_name, is_sglang = speculation.method, class_of(config), speculation.server == "sglang"
    registry = registries()[speculation.server]
    is_nested, expected = config.get("speculators_model_type") is not None, f"a draft model for {method}"
    if is_sglang and is_nested and config.get("model_type") is None:
        actual = "config.json is in the format of speculators, without model_type, at which SGLang stops"
        yield Issue(expected, actual, "serve with vLLM, or convert it for SGLang", file=draft, severity="warning")
    if not class_name or is_nested or method not in registry.of_class or (has_layers and method != "EAGLE3"):
        return
    other = next((one for one in ("dspark", "dflash") if one in class_name.lower() and one != method.lower()), None)
    is_language_model = not is_draft(config) and all(class_name not in one.drafts for one in registries().values())
    if is_language_model and names and {FUSION, f"model.{FUSION}"}.isdisjoint(names):
        actual = f"{class_name} is a language model and has no tensor {FUSION}"
        hint = f"pass a draft model for {method}, or choose the method {'STANDALONE' if is_sglang else 'draft_model'}"
        yield Issue(expected, actual, hint, file=draft)
    elif is_language_model and is_sglang and (names or method == "EAGLE3"):
        actual = f"architectures is {class_name}, so {registry.release} loads it as a language model"
        hint = f"set architectures to a draft class, such as {class_name}Eagle{'3' if method == 'EAGLE3' else ''}"
        yield Issue(expected, actual, hint, file=draft, severity="warning")
    elif other:
        actual, hint = f"{class_name} is a draft model for {other}", f"choose {other} as the method"
        yield Issue(expected, actual, hint, file=draft, severity="warning")


def _sizes(
    speculation: Speculation, draft: Path, config: Mapping[str, Any], target: Mapping[str, Any]
) -> Iterator[Issue]:
    """A draft of another width of hidden states, or another vocabulary, than the target, if both configs have them."""
    try:
        sizes, other = sizes_of(config), target_of(target)
        is_other_width = sizes.version and sizes.target_hidden != other.hidden
    except CkptkitError:
        return
    if is_other_width:
        expected = f"a draft model for hidden size {other.hidden}, that of the served model"
        yield Issue(expected, f"hidden size {sizes.target_hidden}", "pass the draft model of this model", file=draft)
    vocabulary = (sizes.config if sizes.version else language_part(config)).get("vocab_size")
    if type(vocabulary) is not int or vocabulary == other.vocabulary or speculation.mixed:
        return
    expected, actual = f"vocab_size = {other.vocabulary}, as in the served model", f"vocab_size = {vocabulary}"
    engine = {"STANDALONE": "SGLang", "draft_model": "vLLM"}.get(speculation.method)
    if sizes.version:
        hint = "check which model the draft model was trained for: tokens of another tokenizer are rejected"
        yield Issue(expected, actual, hint, file=draft, severity="warning")
    elif engine and not is_draft(config):
        yield Issue(expected, actual, f"pass a draft with the same tokenizer, else {engine} stops", file=draft)


def _tokens(speculation: Speculation, config: Mapping[str, Any] | None) -> Iterator[Issue]:
    """A missing number of draft tokens for vLLM, which has a default only in `n_predict` of a draft model."""
    method = speculation.method
    if speculation.server != "vllm" or speculation.tokens or method == "suffix":
        return
    actual = f"{method} at {speculation.asked_by} has no num_speculative_tokens"
    expected, hint = "num_speculative_tokens", "set num_speculative_tokens, without which {} stops"
    if speculation.draft is None:
        yield Issue(expected, actual, hint.format("vLLM"))
        return
    if config is None or method not in (*registries()["vllm"].of_class, "draft_model", "mtp"):
        return
    is_separate = method == "draft_model" and is_draft(config)
    if method == "mtp" or config.get("speculators_config") is not None:
        # A later release may look there.
        yield Issue(expected, actual, hint.format(registries()["vllm"].release), severity="warning")
    elif config.get("n_predict") is None and not is_separate:
        yield Issue(expected, actual, hint.format("vLLM"))


def _declares_layers(config: Mapping[str, Any]) -> bool:
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    return any(isinstance(part.get(key), int) and part[key] > 0 for part in parts for key in _KEYS)


def _names(subject: Subject, root: Path) -> list[str]:
    """The names of a model's tensors, or [] if they cannot be read."""
    try:
        return list(subject.loaded.get(root, Subject(root)).hf_files.specs)
    except CkptkitError:
        return []


def _has_layers(subject: Subject, root: Path, config: Mapping[str, Any]) -> bool | None:
    """Whether the files contain multi-token prediction layers, or None if their names cannot be read."""
    text = config.get("text_config")
    layers = next((one.get("num_hidden_layers") for one in (config, text or {}) if "num_hidden_layers" in one), None)
    names = _names(subject, root)
    if not names or not isinstance(layers, int):
        return None
    numbered = (match for name in names if (match := LAYER.search(name)))
    return any(_NAMES.match(name) for name in names) or any(int(match[1]) >= layers for match in numbered)
