"""CK131 to CK137: a LoRA adapter is complete, fits its base, changes it, and is served at its training scale."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ckptkit.converters.adapter import FLAT, Adapter
from ckptkit.converters.config.values import integer, number
from ckptkit.converters.lora_settings import FACTOR, ROOT, RULES_OF, LoraSettings, idle_reason, pairs_in
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.hf.adapter import ADAPTER_CONFIG, AdapterFiles, is_adapter
from ckptkit.formats.hf.reader import read_config
from ckptkit.formats.hf.shard import Fault
from ckptkit.formats.hf.side_files import without_quantization
from ckptkit.quant.engines.registry import engine_class
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, Subject, check, once, only_if, warning_if
from ckptkit.verify.evidence.compare import compare
from ckptkit.verify.evidence.folding import EXPERT
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.quirks import Quirk, quirk
from ckptkit.verify.witnesses.reference.job import NamesJob, NamesReport
from ckptkit.verify.witnesses.runner import START_S, Answer, ask_meanwhile

_AGAIN = "export the adapter again from the training run"
_AS_IT_RAN = f"restore {ADAPTER_CONFIG} of the training run, or export the adapter again"
_MERGE_IT = "merge the adapter (`ckptkit convert BASE DST --merge ADAPTER`), or serve it with another engine"
_ONLY_LOADED = ("bias", "fan_in_fan_out")  # fields that PEFT reads, and that `--merge` does not apply


@once
def adapter_files(subject: Subject) -> AdapterFiles:
    """The adapter's files. Raises CkptkitError if they cannot be read."""
    return AdapterFiles(subject.path)


@once
def settings_of(subject: Subject) -> LoraSettings:
    """The settings in adapter_config.json. Raises CkptkitError for unsupported kinds of adapters."""
    return LoraSettings(adapter_files(subject), str(subject.path), _ONLY_LOADED)


@once
def over_base(subject: Subject) -> Adapter:
    """The adapter over its base. Raises CkptkitError for unsupported kinds of adapters."""
    return Adapter(adapter_files(subject), plain(subject.source_path or Path()), str(subject.path), _ONLY_LOADED)


@once
def ask_peft(subject: Subject) -> Future[Answer[NamesReport]] | str:
    """Starts a process in which PEFT loads the adapter, or returns why not. Raises CkptkitError as `settings_of`."""
    settings_of(subject)
    files = adapter_files(subject)
    base = files.config.get("base_model_name_or_path") if subject.source_path is None else str(subject.source_path)
    if missing := [one for one in ("torch", "transformers", "peft") if find_spec(one) is None]:
        return f"{missing[0]} is not installed"
    if _given_adapter(subject) or not (base and isinstance(base, str) and os.path.isfile(f"{base}/config.json")):
        return "the base model of the adapter is not known: pass it as --source"
    job = NamesJob(without_quantization(read_config(Path(base))), list(files.specs.values()), adapter=files.config)
    return ask_meanwhile(job, "ckptkit.verify.witnesses.reference.adapter", NamesReport, START_S)


def _given_adapter(subject: Subject) -> bool:
    return subject.source_path is not None and is_adapter(subject.source_path)


def _has_base(subject: Subject) -> bool:
    return subject.source_path is not None and not _given_adapter(subject)


_needs_base = only_if(_has_base, "--source is not a base model")


@check("CK131", gate=True)
def factors_in_pairs(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The files are complete, and each module has A and B. Raises UnsupportedError for pickles and other adapters."""
    try:
        files = adapter_files(subject)
        settings, pairs = settings_of(subject), pairs_in(files.specs)
        for pair in pairs:
            settings.scale_of(pair.module)
    except UnsupportedError:
        raise
    except CkptkitError as error:
        yield Issue("an adapter that PEFT saved", error.message, error.hint or _AGAIN)
        return
    if lost := [key for key in ("r", "lora_alpha") if files.config.get(key) is None]:
        actual = f"no {' and no '.join(lost)}: PEFT uses 8 instead; {_describe_quirk('rank-or-alpha')}"
        hint, expected = "add the values of the training run", "r and lora_alpha, which define the adapter's scale"
        yield Issue(expected, actual, hint, file=ADAPTER_CONFIG, severity="warning")
    result.compared(len(files.specs))
    if not pairs:
        yield Issue("tensors lora_A and lora_B", "the adapter has neither, so it changes nothing", _AGAIN)
    for part, other in ("AB", "BA"):
        names = [f"{pair.prefix}{part}" for pair, found in pairs.items() if other not in found]
        yield Issue("lora_A and lora_B of each module", f"lora_{other} is missing", _AGAIN, names=names)
    if isinstance(ask_peft(subject), str):  # else PEFT itself reports them (CK132)
        yield from _dropped(subject)


def _dropped(subject: Subject) -> Iterator[Issue]:
    """Tensors that PEFT does not load as stored, by the field of adapter_config.json that causes it."""
    settings, dropped = settings_of(subject), defaultdict[Fault, list[str]](list)
    for pair, found in pairs_in(adapter_files(subject).specs).items():
        for fault in settings.faults(pair, found):
            dropped[fault] += found.values()
    for fault, names in dropped.items():
        yield Issue(fault.expected, fault.actual, _AS_IT_RAN, names=names, as_one=True)


@check("CK132", begin=ask_peft)
def factors_fit(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The tensors that PEFT loads, misses and drops, or, without PEFT, the faults by ckptkit's rules of PEFT."""
    files, asked = adapter_files(subject), ask_peft(subject)
    answer = None if isinstance(asked, str) else asked.result()
    report, why = (None, asked) if answer is None else (answer.report, answer.failure)
    if report is not None and not (report.model_class or report.refused):
        report, why = None, "transformers has no class for the base model, which brings its own code"
    if report is None and "transformers" in subject.against:
        raise CannotCheck(f"PEFT did not run, so the adapter was not checked: {why}")
    if isinstance(asked, str):
        _needs_base(subject)
    result.compared(len(files.specs))
    judge = f"ckptkit by the rules of PEFT {RULES_OF}, because {why}"
    if report is not None:
        judge = ", in ".join(filter(None, (f"PEFT {version('peft')}", report.fits or report.model_class)))
        yield from _by_peft(subject, report)
    elif not _has_base(subject):
        yield from _dropped(subject)  # CK131 left these to PEFT
    result.facts["adapter judged by"] = [judge]
    if not _has_base(subject):
        return
    adapter = over_base(subject)
    if report is None and adapter.unknown:
        raise CannotCheck(f"ckptkit does not know the name of {adapter.unknown[0]} in the base model: {why}")
    if report is None:
        for fault in adapter.faults:
            names = None if fault.name is None else [fault.name]
            yield Issue(fault.expected, fault.actual, fault.hint or _AGAIN, names=names)
        yield Issue("lora_A and lora_B for target_modules", "missing", _AGAIN, names=adapter.unpaired, as_one=True)
    # CK133 judges adapters with nothing but factors of zeros.
    has_more = adapter.saved or any(pair.magnitude is not None for pair in adapter.pairs)
    if has_more and not (adapter.faults or adapter.unknown) and (idle := adapter.idle()) is not None:
        yield Issue("an adapter that changes its base model", f"the adapter changes nothing: {idle}", _AGAIN)


def _by_peft(subject: Subject, report: NamesReport) -> Iterator[Issue]:
    """The tensors that PEFT refuses, drops, builds in another shape or misses, and the cause."""
    specs, peft, dropped = adapter_files(subject).specs, f"PEFT {version('peft')}", list(_dropped(subject))
    if report.refused:
        yield from dropped or [Issue("an adapter that PEFT loads", f"{peft} stops: {report.refused}", _AS_IT_RAN)]
        return
    if report.fits:
        actual = f"{peft} loads it into {report.fits}, but drops its tensors in {report.model_class}, the base's class"
        hint = f"load the base as {report.fits}, or export the adapter for {report.model_class}"
        yield Issue("an adapter for the base's own class", actual, hint, severity="warning")
    if any(not name.startswith(ROOT) for name in specs):
        return  # CK133 finds these
    # SGLang loads factors with an axis of experts (CK137).
    stacked = {name for name in report.unexpected if name in specs and len(specs[name].shape) == 3}
    explained = [one for one in dropped if not set(report.unexpected).isdisjoint(one.names or ())]
    yield from explained
    names = sorted(set(report.unexpected).difference(stacked, *(one.names or () for one in explained)))
    yield Issue(f"a parameter of {report.model_class}", f"{peft} builds none and drops the tensor", names=names)
    for one in report.other_shapes:
        expected = f"shape {list(one.built)}, as {peft} builds it for {report.model_class}"
        yield Issue(expected, f"shape {list(one.stored)}", names=[one.name])
    missing = [name for name in report.missing if not (stacked and ".experts." in name)]
    actual = "not stored, so PEFT initializes it and its training is lost"
    yield Issue("each tensor that PEFT trains", actual, _AGAIN, names=missing, as_one=True)
    if report.unmatched:
        actual = f"{peft} finds no module for {', '.join(report.unmatched)}, and uses r and lora_alpha instead"
        hint = "remove the key, which training ignored too, or write the last part of a module's name"
        yield Issue("patterns that match a module", actual, hint, file=ADAPTER_CONFIG, severity="warning")


@check("CK133")
def factors_change_something(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """No NaN, infinity or zero factor, and PEFT's prefix; zeros in half of them or in some experts are a warning."""
    files = adapter_files(subject)
    actual = "the prefix is missing: PEFT only warns and loads nothing; SGLang and vLLM accept such names"
    expected = f"names that begin with {ROOT}, as PEFT requires"
    bare = [name for name in files.specs if not name.startswith(ROOT)]
    yield Issue(expected, actual, f"add {ROOT} to the start of each name", names=bare, as_one=True)
    zeros: dict[str, None] = {}
    for name, spec in files.specs.items():
        tensor = files.read([name])[name]
        result.compared(nbytes=spec.nbytes)
        if not bool(tensor.isfinite().all()):
            yield Issue("finite numbers", "NaN or infinity", names=[name])
        if FACTOR.fullmatch(name) and not bool(tensor.any()):
            zeros[name] = None
    if (why := idle_reason(files)) is not None:
        actual = f"{why}: the adapter changes nothing"
        yield Issue("an adapter that changes its base model", actual, names=[*zeros] or None, as_one=True)
        return
    factors, expected = [name for name in files.specs if FACTOR.fullmatch(name)], "factors that are not zero"
    if zeros and 2 * len(zeros) >= len(factors):
        hint = "check that the adapter was not saved before the first training step: these factors change nothing"
        yield Issue(expected, "all zero", hint, names=zeros, as_one=True, severity="warning")
        return
    without_expert = partial(EXPERT.sub, ".experts.#.")
    trained = {without_expert(name) for name in files.specs if name not in zeros}
    for name in zeros:
        is_expert = without_expert(name) in trained
        hint = "experts that get no tokens stay zero: check that the router never chose these" * is_expert
        yield Issue(expected, "all zero", hint, names=[name], severity=warning_if(is_expert))


@check("CK134", needs=("source",), applies_to=_needs_base)
def base_is_named(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The directory's name, and the bytes of tensors that the adapter copies from its base."""
    adapter = over_base(subject)
    result.compared()
    declared = adapter.files.config.get("base_model_name_or_path")
    source = subject.source_path or Path()
    actual = source.parent.parent.name.removeprefix("models--") if source.parent.name == "snapshots" else source.name
    expected = str(declared).rstrip("/").replace("/", "--")
    if declared and not expected.endswith(actual) and not actual.endswith(expected.rpartition("--")[2]):
        hint = "compare the two models; the same base may have another name"
        expected = f"the base model {declared}, as in base_model_name_or_path"
        yield Issue(expected, f"--source is {source}", hint, file=ADAPTER_CONFIG, severity="warning")
    for name, spec in adapter.copies.items():
        result.compared(nbytes=spec.nbytes)
        if not adapter.is_copy(name, spec):
            actual, hint = "differs from the adapter's copy of it", "pass the base of the training run as --source"
            yield Issue("the values of the base in training", actual, hint, names=[name], file=source)


@check("CK135", needs=("source",), applies_to=_needs_base)
def served_at_its_scale(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The scale of each engine against that of adapter_config.json."""
    adapter = over_base(subject)
    config = adapter.files.config
    rank, alpha = integer(config, "r", 8), number(config, "lora_alpha", 8)
    result.compared(1 + len(adapter.pairs))
    if rank < 1:
        return  # CK132 reports that engines refuse it
    scales: dict[str, tuple[Quirk, float]] = {}
    for engine in ("sglang", "vllm"):
        if (known := quirk(engine, "lora-scale")) is not None:
            stabilized = config.get("use_rslora") and "use_rslora" not in known.when["fields"]
            scales[engine] = known, alpha / (math.sqrt(rank) if stabilized else rank)
    odd: dict[tuple[float, str], list[str]] = defaultdict(list)
    for pair in adapter.pairs:
        # SGLang refuses other ranks (CK137).
        wrong = [
            f"{known.message} {scale:g}"
            for engine, (known, scale) in scales.items()
            if not math.isclose(pair.scale, scale) and (engine != "sglang" or pair.rank == rank)
        ]
        if wrong:
            odd[pair.scale, ", ".join(wrong)].append(pair.a.name)
    for (scale, actual), names in odd.items():
        yield Issue(f"a scale of {scale:g}", actual, _MERGE_IT, names=names, severity="warning", as_one=True, file=None)


@check("CK136", needs=("source",), applies_to=only_if(_given_adapter, "--source is not an adapter"))
def equals_the_other(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every tensor bit for bit, and the settings of adapter_config.json that change the result."""
    adapter, source = adapter_files(subject), AdapterFiles(subject.source_path or Path())
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"):
        actual, expected = adapter.config.get(key), source.config.get(key)
        if (actual or None) != (expected or None):
            yield Issue(f"{key} = {expected}, as in the source", f"{key} = {actual}", file=ADAPTER_CONFIG)
    lost, extra = source.specs.keys() - adapter.specs.keys(), adapter.specs.keys() - source.specs.keys()
    yield Issue("every tensor of the source", "missing", names=sorted(lost))
    yield Issue("only tensors of the source", "not in the source", names=sorted(extra))
    for name, spec in adapter.specs.items():
        if name in extra:
            continue
        result.compared(nbytes=spec.nbytes)
        if spec != source.specs[name]:
            yield Issue(str(source.specs[name]), str(spec), names=[name])
        elif (diff := compare(name, adapter.read([name])[name], source.read([name])[name], None)).unequal:
            yield Issue("the source's values", f"{diff.unequal} of {diff.elements} elements differ", names=[name])


def _describe_quirk(part: str, **facts: object) -> str:
    """The engines' known behaviour for a part of an adapter (the quirks `lora-PART`), or ""."""
    both = [quirk(engine, f"lora-{part}") for engine in ("sglang", "vllm")]
    return "; ".join(known.message.format(**facts) for known in both if known is not None)


@check("CK137", needs=("source",), applies_to=_needs_base)
def taken_whole(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Names and ranks against the behaviour of the engines' LoRA managers."""
    adapter = over_base(subject)
    files, kinds = adapter.files, {name.rpartition(".")[0].rpartition(".")[2] for name in adapter.base.specs}
    result.compared(len(files.specs))
    rank = integer(files.config, "r", 8)
    found: dict[str, list[str]] = defaultdict(list)
    factors = {name: match for name in files.specs if (match := FACTOR.fullmatch(name))}
    modules, stacked = {match[1] for match in factors.values()}, _describe_quirk("stacked")
    known = quirk("sglang", "lora-together")
    together = [pair.split() for pair in known.when["fields"]] if known else []
    for name, match in factors.items():
        parent, _, leaf = match[1].rpartition(".")
        if match[3] == "magnitude_vector":
            found[_describe_quirk("dora")].append(name)
        elif match[3] != "A":
            continue
        elif len(files.specs[name].shape) == 3:
            found[stacked] += [name, name.replace("lora_A", "lora_B")]
        elif leaf == "experts":
            found[_describe_quirk("experts")].append(name)
        elif ".experts." not in name and not match[2] and files.specs[name].shape[0] != rank:
            found[_describe_quirk("ranks", rank=rank)].append(name)
        for one, other in together:
            is_single = leaf == one and other in kinds and f"{parent}.{other}" not in modules
            if is_single and ".experts" not in name:
                found[_describe_quirk("together", present=one, absent=other)].append(name)
    family, config = adapter.family, adapter.base.config
    if family.towers(config) and not engine_class("vllm", config).adapters_of_text:
        actual = _describe_quirk("text-layers", model_class=family.class_of(config))
        found[actual] += [name for name in factors if name.startswith(f"{ROOT}model.layers.")]
    saved = [name for name in files.specs if name not in factors and ".base_layer." not in name]
    found[_describe_quirk("whole-tensor")] += saved
    found.pop("", None)  # no tested release has this quirk
    for actual, names in found.items():
        hint = FLAT if actual == stacked else _MERGE_IT
        yield Issue("tensors that SGLang and vLLM load", actual, hint, names=names, severity="warning", as_one=True)
