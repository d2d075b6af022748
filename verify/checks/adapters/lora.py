"""CK131 to CK136: a LoRA adapter is whole, fits its base, changes it, and is served at the scale it was trained at."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.adapter import ADAPTER_CONFIG, AdapterFiles, is_adapter
from converters.adapter import FACTOR, Adapter
from converters.hf_names import layer_of
from verify.check import Tally, always, check
from verify.evidence.plain import plain
from verify.evidence.subject import Subject
from verify.issue import Issue

_AGAIN = "export the adapter again from the run"
_NUMBER = re.compile(r"(?<=layers\.)\d+")
_GIVEN_AWAY = "no base model was given as --source"


def adapter_files(subject: Subject) -> AdapterFiles:
    """The adapter's files. Raises CkptkitError where they cannot be read."""
    return AdapterFiles(subject.path)


def other_adapter(subject: Subject) -> AdapterFiles | None:
    """The adapter that `--source` names; None where it names a base model, or nothing."""
    source = subject.source_path
    return AdapterFiles(source) if source is not None and is_adapter(source) else None


def over_base(subject: Subject) -> Adapter:
    """The adapter over its base. Raises CkptkitError for kinds that are not read."""
    base = plain(subject.source_path or Path())
    return Adapter(subject.once(adapter_files), base, str(subject.path))


def without_base(subject: Subject) -> str | None:
    """For checks that need the base model."""
    return _GIVEN_AWAY if subject.source_path is None or is_adapter(subject.source_path) else None


def without_other(subject: Subject) -> str | None:
    """For checks that compare two adapters."""
    given = subject.source_path is not None and is_adapter(subject.source_path)
    return None if given else "no other adapter was given as --source"


@check(
    "CK131",
    "factors are in pairs, and in every layer",
    stage="adapter",
    gate=True,
    rationale="An engine adds B A to a weight only where it finds both, and leaves out a layer without a word.",
    fix="Export the adapter again; compare the number of its tensors with what the trainer has.",
    unless=always,
)
def factors_in_pairs(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """A and B of each module, of one rank; a kind of module that some layers have and others have not."""
    try:
        files = subject.once(adapter_files)
    except CkptkitError as error:
        yield Issue("an adapter that PEFT saved", error.message, error.hint or _AGAIN, file=subject.path)
        return
    parts: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
    for name, spec in files.specs.items():
        if match := FACTOR.fullmatch(name):
            parts[name[: match.start(3)].removesuffix(".lora_")][match[3]] = spec
    tally.compared(0, len(files.specs))
    if not parts:
        yield Issue("factors lora_A and lora_B", "none", _AGAIN, file=subject.path)
        return
    alone = {stem: next(iter(own)) for stem, own in parts.items() if not {"A", "B"} <= own.keys()}
    for part in "AB":
        names = [f"{stem}.lora_{part}" for stem, found in alone.items() if found == part]
        yield Issue("factors A and B in pairs", f"lora_{part} alone", _AGAIN, names=names, file=subject.path)
    layers = {stem: layer_of(f"{stem}.weight") for stem in parts}
    of_kind: dict[str, set[int]] = defaultdict(set)
    for stem, layer in layers.items():
        if layer is not None:
            of_kind[_NUMBER.sub("{}", stem)].add(layer)
    everywhere = set().union(*of_kind.values())
    chosen = files.config.get("layers_to_transform")
    for kind, found in of_kind.items() if chosen is None and subject.source_path is None else ():
        lost = sorted(everywhere - found)
        if lost and 2 * len(found) > len(everywhere):
            names = [kind.replace("{}", str(layer), 1) for layer in lost]
            yield Issue("a pair in every layer, as in the others", "none", _AGAIN, names=names, file=subject.path)


@check(
    "CK132",
    "every factor fits a weight of the base model",
    stage="adapter",
    needs=("source", "sound headers"),
    rationale="Factors of another shape or name belong to another base, or were exchanged; engines skip what they do "
    "not know.",
    fix="Compare with the base that the run was started from, and with target_modules of adapter_config.json.",
    unless=without_base,
)
def factors_fit(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Names, shapes and ranks; layers in which the base has a module that the adapter changes elsewhere."""
    adapter = subject.once(over_base)
    tally.compared(0, len(adapter.files.specs))
    for fault in adapter.faults:
        names = None if fault.name is None else [fault.name]
        yield Issue(fault.expected, fault.actual, fault.hint or _AGAIN, names=names, file=subject.path)
    chosen = adapter.files.config.get("layers_to_transform")
    yield from _lost_layers(adapter) if chosen is None else ()


def _lost_layers(adapter: Adapter) -> Iterator[Issue]:
    changed = {spec.name for pair in adapter.pairs for spec in pair.targets.specs}
    kinds = {re.sub(r"\d+", "{}", name) for name in changed if layer_of(name) is not None}
    same = [name for name in adapter.base.specs if re.sub(r"\d+", "{}", name) in kinds]
    lost = [name for name in same if name not in changed]
    if len(lost) < len(changed):  # else the run chose layers by an expression
        yield Issue(
            "a pair for each weight of this kind", "none", _AGAIN, names=lost, file=adapter.files.root, together=True
        )


@check(
    "CK133",
    "factors are finite, and change something",
    stage="adapter",
    needs=("sound headers",),
    rationale="B begins as zeros: a pair whose B is still zero was not trained, or was not gathered for the export.",
    fix="Export the adapter again; compare with what the trainer holds.",
)
def factors_change_something(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """No NaN, no infinity; no factor of zeros while others are not."""
    files = subject.once(adapter_files)
    zeros: list[str] = []
    factors = 0
    for name, spec in files.specs.items():
        tensor = files.read([name])[name]
        tally.compared(spec.nbytes)
        if not bool(tensor.isfinite().all()):
            yield Issue("finite numbers", "NaN or infinity", _AGAIN, names=[name], file=subject.path)
        if FACTOR.fullmatch(name):
            factors += 1
            zeros += [] if bool(tensor.any()) else [name]
    if factors and 2 * len(zeros) >= factors:
        hint = "the adapter changes nothing: was it saved before the first step?"
        yield Issue("factors that are not zero", "zeros", hint, names=zeros, together=True, severity="warning")
    else:
        yield Issue("factors that are not zero", "zeros", _AGAIN, names=zeros, file=subject.path)


@check(
    "CK134",
    "the base is the one that the adapter names",
    stage="adapter",
    needs=("source", "sound headers"),
    rationale="A sibling of the base (base and instruct, another step) has the same shapes; nothing fails, and answers "
    "are worse.",
    fix="Serve the adapter on the base that base_model_name_or_path of adapter_config.json names.",
    unless=without_base,
)
def base_is_named(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The directory's name, and the bytes of the base's own tensors where the adapter holds them."""
    adapter = subject.once(over_base)
    tally.compared(0)
    stated = adapter.files.config.get("base_model_name_or_path")
    source = subject.source_path or Path()
    place = source.parent.parent.name.removeprefix("models--") if source.parent.name == "snapshots" else source.name
    own = str(stated).rstrip("/").replace("/", "--")
    if stated and not own.endswith(place) and not place.endswith(own.rpartition("--")[2]):
        hint = "compare the two; a base under another name is no fault"
        file = subject.path / ADAPTER_CONFIG
        yield Issue(
            f"the base {stated}, as base_model_name_or_path says", f"{source}", hint, file=file, severity="warning"
        )
    for name, spec in adapter.copies.items():
        tally.compared(spec.nbytes)
        here, there = adapter.files.read([spec.name])[spec.name], adapter.base.read([name])[name]
        if not bool((here.to(there.dtype) == there).all()):
            actual = "other values than the adapter's own copy of it"
            yield Issue("the base that the adapter was trained on", actual, "give that base", names=[name], file=source)


@check(
    "CK135",
    "engines serve the adapter at its own scale",
    stage="adapter",
    needs=("source", "sound headers"),
    rationale="SGLang 0.5.16 and vLLM 0.26 scale all pairs by lora_alpha / r: they do not read rank_pattern and "
    "alpha_pattern, SGLang nor use_rslora. The server answers, and the adapter is too weak or too strong.",
    fix="Merge the adapter (`ckptkit convert BASE DST --merge ADAPTER`) and serve that, or train with one rank and "
    "alpha.",
    unless=without_base,
)
def served_at_its_scale(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """What each engine multiplies by, against adapter_config.json."""
    adapter = subject.once(over_base)
    rank, own = adapter.scale_of("")
    alpha = own * (math.sqrt(rank) if adapter.files.config.get("use_rslora") else rank)
    tally.compared(0, len(adapter.pairs))
    odd: dict[tuple[float, str], list[str]] = defaultdict(list)
    for pair in adapter.pairs:
        given = {"SGLang 0.5.16": alpha / rank, "vLLM 0.26": own}
        wrong = {engine: scale for engine, scale in given.items() if not math.isclose(pair.scale, scale)}
        if wrong:
            words = [f"{engine} scales it by {scale:g}" for engine, scale in wrong.items()]
            odd[pair.scale, ", ".join(words)].append(pair.a.name)
    for (right, actual), names in odd.items():
        hint = "merge it (`ckptkit convert BASE DST --merge ADAPTER`), or serve it with another engine"
        yield Issue(f"a scale of {right:g}", actual, hint, names=names, severity="warning", together=True)


@check(
    "CK136",
    "the adapter equals the source adapter",
    stage="adapter",
    needs=("source", "sound headers"),
    rationale="Between trainer and engine an adapter is renamed, gathered over ranks and cast: a layer can be stale, "
    "experts exchanged, alpha doubled.",
    fix="Export it again from the adapter it was made from.",
    unless=without_other,
)
def equals_the_other(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every tensor bit for bit, and what adapter_config.json makes of them."""
    here, there = subject.once(adapter_files), subject.once(other_adapter)
    if there is None:
        return
    yield from _settings(here.config, there.config, subject.path / ADAPTER_CONFIG)
    lost, more = there.specs.keys() - here.specs.keys(), here.specs.keys() - there.specs.keys()
    yield Issue("every tensor of the source", "not there", _AGAIN, names=sorted(lost), file=subject.path)
    yield Issue("no other tensor than the source's", "one more", _AGAIN, names=sorted(more), file=subject.path)
    for name, spec in here.specs.items():
        if name in more:
            continue
        tally.compared(spec.nbytes)
        one, other = here.read([name])[name], there.read([name])[name]
        if spec != there.specs[name]:
            yield Issue(str(there.specs[name]), str(spec), _AGAIN, names=[name], file=subject.path)
        elif not bool((one == other).all()):
            count = int((one != other).sum())
            yield Issue(
                "the source's values", f"{count} of {one.numel()} differ", _AGAIN, names=[name], file=subject.path
            )


def _settings(here: Mapping[str, object], there: Mapping[str, object], file: Path) -> Iterator[Issue]:
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"):
        if (here.get(key) or None) != (there.get(key) or None):
            yield Issue(f"{key} {there.get(key)}, as the source has", f"{here.get(key)}", _AGAIN, file=file)
