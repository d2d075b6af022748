"""CK131 to CK137: a LoRA adapter is whole, fits its base, changes it, and is served at the scale it was trained at."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
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
from ckptkit.verify.core.check import Tally, check, only_if
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.compare import compare
from ckptkit.verify.evidence.folding import EXPERT
from ckptkit.verify.evidence.plain import plain
from ckptkit.verify.quirks import Quirk, quirk
from ckptkit.verify.witnesses.reference.job import NamesJob, NamesReport
from ckptkit.verify.witnesses.runner import START_S, Answer, ask_meanwhile

_AGAIN = "export the adapter again from the run"
_AS_IT_RAN = f"write {ADAPTER_CONFIG} as the run had it, or export the adapter again from the run"
_MERGE_IT = "merge it (`ckptkit convert BASE DST --merge ADAPTER`), or serve it with another engine"
_WITNESS = "ckptkit.verify.witnesses.reference.adapter"
_ONLY_LOADED = ("bias", "fan_in_fan_out")  # fields that PEFT is asked about, and that `--merge` does not apply


@once
def adapter_files(subject: Subject) -> AdapterFiles:
    """The adapter's files. Raises CkptkitError where they cannot be read."""
    return AdapterFiles(subject.path)


@once
def settings_of(subject: Subject) -> LoraSettings:
    """What adapter_config.json has PEFT do. Raises CkptkitError for kinds that are not read."""
    return LoraSettings(adapter_files(subject), str(subject.path), _ONLY_LOADED)


@once
def over_base(subject: Subject) -> Adapter:
    """The adapter over its base. Raises CkptkitError for kinds that are not read."""
    base = plain(subject.source_path or Path())
    return Adapter(adapter_files(subject), base, str(subject.path), _ONLY_LOADED)


@once
def ask_peft(subject: Subject) -> Future[Answer[NamesReport]] | str:
    """PEFT's answer about the adapter, which a process of its own gives meanwhile; or why it is not asked.

    The base is --source, or a directory that base_model_name_or_path names. Raises CkptkitError as `settings_of`.
    """
    settings_of(subject)
    files = adapter_files(subject)
    base = files.config.get("base_model_name_or_path") if subject.source_path is None else str(subject.source_path)
    if missing := [one for one in ("torch", "transformers", "peft") if find_spec(one) is None]:
        return f"{missing[0]} is not installed"
    if _given_adapter(subject) or not (base and isinstance(base, str) and os.path.isfile(f"{base}/config.json")):
        return "its base is not known: give it as --source"
    config = without_quantization(read_config(Path(base)))
    job = NamesJob(config, list(files.specs.values()), adapter=files.config)
    return ask_meanwhile(job, _WITNESS, NamesReport, START_S)


def _given_adapter(subject: Subject) -> bool:
    return subject.source_path is not None and is_adapter(subject.source_path)


def _has_base(subject: Subject) -> bool:
    return subject.source_path is not None and not _given_adapter(subject)


_NO_BASE = "no base model was given as --source"
_needs_base = only_if(_has_base, _NO_BASE)


@check("CK131", gate=True)
def factors_in_pairs(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The files are whole, and A and B of each module are there.

    Raises UnsupportedError for a pickle, and for another kind of adapter, which has no such factors.
    """
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
        actual = f"{' and '.join(lost)} not there: PEFT takes 8; {_known('rank-or-alpha')}"
        hint, expected = "write the value that the run was started with", "r and lora_alpha, of which the scale is made"
        yield Issue(expected, actual, hint, file=ADAPTER_CONFIG, severity="warning")
    tally.compared(len(files.specs))
    if not pairs:
        actual = "the adapter has no lora_A and no lora_B, and changes nothing"
        yield Issue("factors lora_A and lora_B", actual, _AGAIN)
    for part, other in ("AB", "BA"):
        names = [f"{pair.prefix}{part}" for pair, found in pairs.items() if other not in found]
        yield Issue("factors A and B in pairs", f"lora_{other} is missing", _AGAIN, names=names)
    if isinstance(ask_peft(subject), str):  # else PEFT names them itself (CK132)
        yield from _dropped(subject)


def _dropped(subject: Subject) -> Iterator[Issue]:
    """Pairs that PEFT does not load as they are stored, by the field of adapter_config.json that is the reason."""
    settings, dropped = settings_of(subject), defaultdict[Fault, list[str]](list)
    for pair, found in pairs_in(adapter_files(subject).specs).items():
        for fault in settings.faults(pair, found):
            dropped[fault] += found.values()
    for fault, names in dropped.items():
        yield Issue(fault.expected, fault.actual, _AS_IT_RAN, names=names, as_one=True)


@check("CK132", begin=ask_peft)
def factors_fit(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """What PEFT itself loads, misses and drops; where it cannot be asked, what ckptkit's rules of PEFT find."""
    files, asked = adapter_files(subject), ask_peft(subject)
    answer = None if isinstance(asked, str) else asked.result()
    report, why = (None, asked) if answer is None else (answer.report, answer.failure)
    if report is not None and not (report.model_class or report.refused):
        report, why = None, "transformers has no class for the base without code of its own"
    if report is None and "transformers" in subject.against:
        raise CannotCheck(f"PEFT could not be asked, which says nothing about the adapter: {why}")
    if not _has_base(subject) and isinstance(asked, str):
        raise NotApplicable(_NO_BASE)
    tally.compared(len(files.specs))
    judge = f"ckptkit's rules of PEFT {RULES_OF}: {why}"
    if report is not None:
        judge = ", in ".join(filter(None, (f"PEFT {version('peft')}", report.fits or report.model_class)))
        yield from _by_peft(subject, report)
    elif not _has_base(subject):
        yield from _dropped(subject)  # which CK131 left to PEFT
    tally.facts["adapter judged by"] = [judge]
    if not _has_base(subject):
        return
    adapter = over_base(subject)
    if report is None and adapter.unknown:
        raise CannotCheck(f"the base has no {adapter.unknown[0]}, and how it would spell that is not known: {why}")
    if report is None:
        for fault in adapter.faults:
            names = None if fault.name is None else [fault.name]
            yield Issue(fault.expected, fault.actual, fault.hint or _AGAIN, names=names)
        yield Issue("a pair for each weight that is targeted", "none", _AGAIN, names=adapter.unpaired, as_one=True)
    # What has factors of zeros alone is for CK133 to say.
    has_more = adapter.saved or any(pair.magnitude is not None for pair in adapter.pairs)
    if has_more and not (adapter.faults or adapter.unknown) and (idle := adapter.idle()) is not None:
        yield Issue("an adapter that changes its base", f"it changes nothing: {idle}", _AGAIN)


def _by_peft(subject: Subject, report: NamesReport) -> Iterator[Issue]:
    """What PEFT refuses, drops, has in another shape, and finds no tensor for; with the field that is the reason."""
    specs, peft, dropped = adapter_files(subject).specs, f"PEFT {version('peft')}", list(_dropped(subject))
    if report.refused:
        yield from dropped or [Issue("an adapter that PEFT loads", f"{peft} stops: {report.refused}", _AS_IT_RAN)]
        return
    if report.fits:
        actual = f"{peft} loads it into {report.fits}, and drops it in {report.model_class}, the base's class"
        hint = f"load the base as {report.fits}, or export the adapter for {report.model_class}"
        yield Issue("an adapter for the base's own class", actual, hint, severity="warning")
    if any(not name.startswith(ROOT) for name in specs):
        return  # which CK133 finds
    # SGLang takes factors with an axis of experts (CK137).
    stacked = {name for name in report.unexpected if name in specs and len(specs[name].shape) == 3}
    explained = [one for one in dropped if not set(report.unexpected).isdisjoint(one.names or ())]
    yield from explained
    names = sorted(set(report.unexpected).difference(stacked, *(one.names or () for one in explained)))
    yield Issue(f"a tensor of {report.model_class} with this adapter", f"{peft} has none, and drops it", names=names)
    for one in report.other_shapes:
        shape = f"shape {list(one.built)}, as {peft} has it for {report.model_class}"
        yield Issue(shape, f"shape {list(one.stored)}", names=[one.name])
    missing = [name for name in report.missing if not (stacked and ".experts." in name)]
    actual = "not stored: what was trained there is lost, and PEFT begins anew"
    yield Issue("a tensor for each that PEFT trains", actual, _AGAIN, names=missing, as_one=True)
    if report.unmatched:
        actual = f"{', '.join(report.unmatched)}: {peft} has no such module, and goes by r and lora_alpha"
        hint = "leave it out, as the adapter was trained, or spell it as the end of a module's name"
        yield Issue("patterns that name modules", actual, hint, file=ADAPTER_CONFIG, severity="warning")


@check("CK133")
def factors_change_something(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """No NaN, no infinity; no factor of zeros while others are not; names under which PEFT looks for them.

    Zeros are a warning where half of the factors are, and in some experts of a layer, to which no token was sent.
    """
    files = adapter_files(subject)
    actual = "not there: PEFT warns, and the adapter changes nothing; SGLang and vLLM take the names as they are"
    expected = f"{ROOT} before every name, where PEFT looks for it"
    bare = [name for name in files.specs if not name.startswith(ROOT)]
    yield Issue(expected, actual, f"put {ROOT} before each name", names=bare, as_one=True)
    zeros: dict[str, None] = {}
    for name, spec in files.specs.items():
        tensor = files.read([name])[name]
        tally.compared(nbytes=spec.nbytes)
        if not bool(tensor.isfinite().all()):
            yield Issue("finite numbers", "NaN or infinity", names=[name])
        if FACTOR.fullmatch(name) and not bool(tensor.any()):
            zeros[name] = None
    if (why := idle_reason(files)) is not None:
        actual = f"{why}: the adapter changes nothing"
        yield Issue("an adapter that changes its base", actual, names=[*zeros] or None, as_one=True)
        return
    factors, expected = [name for name in files.specs if FACTOR.fullmatch(name)], "factors that are not zero"
    if zeros and 2 * len(zeros) >= len(factors):
        hint = "only whole tensors or magnitudes change the base: was it saved before the first step?"
        yield Issue(expected, "zeros", hint, names=zeros, as_one=True, severity="warning")
        return
    trained = {_of_layer(name) for name in files.specs if name not in zeros}
    for name in zeros:
        is_expert = _of_layer(name) in trained
        hint = "was no token sent to these experts?" * is_expert
        yield Issue(expected, "zeros", hint, names=[name], severity=warning_if(is_expert))


def _of_layer(name: str) -> str:
    """The name of a factor without the expert's number."""
    return EXPERT.sub(".experts.#.", name)


@check("CK134", needs=("source",), applies_to=_needs_base)
def base_is_named(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The directory's name, and the bytes of the base's own tensors where the adapter holds them."""
    adapter = over_base(subject)
    tally.compared()
    stated = adapter.files.config.get("base_model_name_or_path")
    source = subject.source_path or Path()
    place = source.parent.parent.name.removeprefix("models--") if source.parent.name == "snapshots" else source.name
    own = str(stated).rstrip("/").replace("/", "--")
    if stated and not own.endswith(place) and not place.endswith(own.rpartition("--")[2]):
        hint = "compare the two; a base under another name is no fault"
        expected = f"the base {stated}, as base_model_name_or_path says"
        yield Issue(expected, f"{source}", hint, file=ADAPTER_CONFIG, severity="warning")
    for name, spec in adapter.copies.items():
        tally.compared(nbytes=spec.nbytes)
        if not adapter.is_copy(name, spec):
            actual = "other values than the adapter's own copy of it"
            yield Issue("the base that the adapter was trained on", actual, "give that base", names=[name], file=source)


@check("CK135", needs=("source",), applies_to=_needs_base)
def served_at_its_scale(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """What each engine multiplies by, against adapter_config.json."""
    adapter = over_base(subject)
    config = adapter.files.config
    rank, alpha = integer(config, "r", 8), number(config, "lora_alpha", 8)
    tally.compared(1 + len(adapter.pairs))
    if rank < 1:
        return  # which engines refuse, and CK132 says
    given: dict[str, tuple[Quirk, float]] = {}
    for engine in ("sglang", "vllm"):
        if (known := quirk(engine, "lora-scale")) is not None:
            stabilized = config.get("use_rslora") and "use_rslora" not in known.when["fields"]
            given[engine] = known, alpha / (math.sqrt(rank) if stabilized else rank)
    odd: dict[tuple[float, str], list[str]] = defaultdict(list)
    for pair in adapter.pairs:
        wrong = {engine: one for engine, one in given.items() if not math.isclose(pair.scale, one[1])}
        if pair.rank != rank:  # which SGLang refuses (CK137)
            wrong.pop("sglang", None)
        if wrong:
            words = [f"{known.message} {scale:g}" for known, scale in wrong.values()]
            odd[pair.scale, ", ".join(words)].append(pair.a.name)
    for (right, actual), names in odd.items():
        wanted = f"a scale of {right:g}"
        yield Issue(wanted, actual, _MERGE_IT, names=names, severity="warning", as_one=True, file=None)


@check("CK136", needs=("source",), applies_to=only_if(_given_adapter, "no other adapter was given as --source"))
def equals_the_other(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every tensor bit for bit, and what adapter_config.json makes of them."""
    here, there = adapter_files(subject), AdapterFiles(subject.source_path or Path())
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"):
        own, stated = here.config.get(key), there.config.get(key)
        if (own or None) != (stated or None):
            yield Issue(f"{key} {stated}, as the source has", f"{own}", file=ADAPTER_CONFIG)
    lost, more = there.specs.keys() - here.specs.keys(), here.specs.keys() - there.specs.keys()
    yield Issue("every tensor of the source", "not there", names=sorted(lost))
    yield Issue("no other tensor than the source's", "one more", names=sorted(more))
    for name, spec in here.specs.items():
        if name in more:
            continue
        tally.compared(nbytes=spec.nbytes)
        if spec != there.specs[name]:
            yield Issue(str(there.specs[name]), str(spec), names=[name])
        elif (far := compare(name, here.read([name])[name], there.read([name])[name], None)).unequal:
            yield Issue("the source's values", f"{far.unequal} of {far.elements} differ", names=[name])


def _known(part: str, **facts: object) -> str:
    """What engines are known to do with a part of an adapter, `lora-PART` of their quirks; empty for nothing."""
    both = [quirk(engine, f"lora-{part}") for engine in ("sglang", "vllm")]
    return "; ".join(known.message.format(**facts) for known in both if known is not None)


@check("CK137", needs=("source",), applies_to=_needs_base)
def taken_whole(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Names and ranks, against what the engines' own LoRA managers do with them."""
    adapter = over_base(subject)
    files, kinds = adapter.files, {name.rpartition(".")[0].rpartition(".")[2] for name in adapter.base.specs}
    tally.compared(len(files.specs))
    rank = integer(files.config, "r", 8)
    found: dict[str, list[str]] = defaultdict(list)
    factors = {name: match for name in files.specs if (match := FACTOR.fullmatch(name))}
    modules, stacked = {match[1] for match in factors.values()}, _known("stacked")
    known = quirk("sglang", "lora-together")
    together = [pair.split() for pair in known.when["fields"]] if known else []
    for name, match in factors.items():
        parent, _, leaf = match[1].rpartition(".")
        if match[3] == "magnitude_vector":
            found[_known("dora")].append(name)
        elif match[3] != "A":
            continue
        elif len(files.specs[name].shape) == 3:
            found[stacked] += [name, name.replace("lora_A", "lora_B")]
        elif leaf == "experts":
            found[_known("experts")].append(name)
        elif ".experts." not in name and not match[2] and files.specs[name].shape[0] != rank:
            found[_known("ranks", rank=rank)].append(name)
        for own, other in together:
            alone = leaf == own and other in kinds and f"{parent}.{other}" not in modules
            if alone and ".experts" not in name:
                found[_known("together", present=own, absent=other)].append(name)
    family, config = adapter.family, adapter.base.config
    if family.towers(config) and not engine_class("vllm", config).adapters_of_text:
        actual = _known("text-layers", model_class=family.class_of(config))
        found[actual] += [name for name in factors if name.startswith(f"{ROOT}model.layers.")]
    whole = [name for name in files.specs if name not in factors and ".base_layer." not in name]
    found[_known("whole-tensor")] += whole
    found.pop("", None)  # what no tested release is known to do
    for actual, names in found.items():
        hint = FLAT if actual == stacked else _MERGE_IT
        yield Issue("every part of an adapter served", actual, hint, names=names, severity="warning", as_one=True)
