"""CK501 to CK508: what a real engine made of the checkpoint. One run of each engine serves all of its checks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial, update_wrapper
from importlib.util import find_spec
from typing import TYPE_CHECKING

from converters.passthrough import lost_towers
from converters.planner import dims_of, expected_hf
from verify.check import Run, Skip, Tally, Unable, Unless, always, check, without
from verify.checks.config.config import is_parallel
from verify.checks.config.spellings import keys_of
from verify.checks.witnesses.hints import (
    KEEP_ROUTER,
    keep_router,
    why_dropped,
    why_not_repacked,
    why_refused,
    why_unwritten,
)
from verify.evidence.expected import (
    config_of,
    is_cache_scale,
    is_quantized,
    stated_config_of,
    usable_config,
    weights_of,
)
from verify.evidence.folding import by_pattern, group_by_pattern
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.report import Severity
from verify.witnesses.loading.engine import EngineFacts
from verify.witnesses.loading.job import LoadReport, Observation
from verify.witnesses.loading.names import of_draft
from verify.witnesses.loading.run import LoadedBy, engine_sizes, interpreter_of
from verify.witnesses.registry import ENGINES

if TYPE_CHECKING:  # each adapter is held to the protocol
    from verify.witnesses.loading.engine import Engine
    from verify.witnesses.sglang import adapter as sglang
    from verify.witnesses.vllm import adapter as vllm

    _ADAPTERS: tuple[Engine, ...] = (sglang, vllm)

_NUMBER = re.compile(r"[-+]?\d[\d.e+-]*")


def _may_have_routers(subject: Subject) -> bool:
    config = usable_config(subject)
    return config is None or dims_of(config).experts > 0


Issues = Callable[[EngineFacts, Subject, Tally], Iterator[Issue]]


def each_engine(
    number: int, title: str, *, rationale: str, fix: str, unless: Unless = always, explained_by: tuple[str, ...] = ()
) -> Callable[[Issues], dict[str, Run]]:
    """Registers a check once for every engine; `{engine}` in the texts is what it is called.

    In `explained_by` `{engine}3` is the third check of the same engine.
    """

    def register(issues: Issues) -> dict[str, Run]:
        return {
            engine.name: check(
                f"{engine.codes}{number}",
                title.format(engine=engine.label),
                stage=engine.name,
                needs=(engine.name,),
                rationale=rationale.format(engine=engine.label),
                fix=fix.format(engine=engine.label, sizes=engine.sizes),
                unless=unless,
                explained_by=tuple(code.format(engine=engine.codes) for code in explained_by),
            )(update_wrapper(partial(issues, engine), issues))
            for engine in ENGINES
        }

    return register


def _report(engine: EngineFacts, subject: Subject) -> LoadReport:
    run = subject.once(LoadedBy(engine))
    if run.unable:
        raise Unable(run.unable)
    if run.report is None:
        raise Skip(f"not run because {engine.label} did not load the checkpoint ({engine.codes}1)")
    return run.report


def _reports(engine: EngineFacts, subject: Subject) -> Iterator[tuple[LoadReport, str | None]]:
    """What was seen of the model and of its draft model, where there is one, with the name of the latter."""
    yield _report(engine, subject), None
    if (draft := subject.once(LoadedBy(engine)).draft) is not None:
        yield draft, f"{engine.label}'s draft model"


def _nothing_to_repack(subject: Subject) -> str | None:
    """Without a GPU, unquantized weights stay as they are; with one, whatever SGLang makes of them is looked at."""
    if find_spec("torch") is None:  # then SGLang's check says what is missing
        return _all_plain(subject)
    import torch

    return None if torch.cuda.is_available() else _all_plain(subject)


def _all_plain(subject: Subject) -> str | None:
    config = usable_config(subject)
    plain = subject.is_megatron or (config is not None and not is_quantized(config))
    return "no weight is quantized, so none is repacked without a GPU" if plain else None


def _findings(
    engine: EngineFacts,
    observations: Iterable[Observation],
    expected: str,
    hint: Callable[[Observation], str],
    draft: str | None,
    severity: Severity = "error",
) -> Iterator[Issue]:
    """One issue for observations whose texts and names differ in numbers only, described by the first of them."""
    kinds: dict[str, dict[str, Observation]] = defaultdict(dict)
    for seen in observations:
        kinds[f"{_NUMBER.sub('#', seen.what)} {seen.rank}"][seen.tensor] = seen
    for kind in kinds.values():
        for names in group_by_pattern(kind):
            seen = kind[names[0]]
            as_named = seen.param == seen.tensor and draft is None
            place = "" if as_named else f", at {seen.param} in {draft or engine.label}"
            example = "" if len(names) == 1 else f" ({names[0]}, for one)"
            actual, move = seen.what + place + example, hint(seen)
            yield Issue(expected, actual, move, names=names, rank=seen.rank, severity=severity, file=None)


@each_engine(
    1,
    "{engine} loads the checkpoint",
    rationale="What the reader of a format refuses is not a checkpoint, whatever its files look like.",
    fix="Read the exception: most often config.json describes another model than the weights, or a packed layer has "
    "the wrong group size.",
)
def loads(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The engine's own model class is built from the config and loaded by its own `load_weights`."""
    run = subject.once(LoadedBy(engine))
    if run.unable:
        raise Unable(run.unable)
    if run.report is None:
        message = run.crash or "it ended without a report"
        _, lacking = keys_of(subject.once(stated_config_of))
        hint = why_refused(engine, message, lacking)
        yield Issue(f"{engine.label}'s model is built and loads the weights", message, hint)
        return
    report = run.report
    tally.compared(0, report.loaded_names)
    untested = "" if report.version in engine.tested else f" (tested are {', '.join(engine.tested)})"
    release = f"{engine.label} {report.version}{untested}"
    facts = [f"{release}, {report.model}, {report.dtype}, {report.sizes}, on {report.device}"]
    facts += [f"{report.loaded_names} tensors into {report.parameters} parameters"]
    not_seen = report.draft if run.draft is None else ()
    facts += [f"of multi-token prediction layers, not looked at: {text}" for text, _ in by_pattern(not_seen)]
    facts += [f"it logged: {line}" for line in report.log[:5]]
    facts += [words for name, words in engine.clashes if interpreter_of(engine, subject).release(name)]
    for text, names in by_pattern(report.requantized):
        change = max(report.requantized[name] for name in names)
        facts.append(f"requantized for its kernel: {text}, by up to {change:.1%} of a block's largest value")
    tally.facts[engine.label] = facts


@each_engine(
    2,
    "{engine} leaves no parameter unwritten",
    rationale="{engine} allocates parameters without filling them and never checks that all were loaded: an unwritten "
    "one serves garbage with HTTP 200.",
    fix="Give the checkpoint the tensors that the finding names, under names that {engine} knows.",
    explained_by=("CK104", "CK301", "CK302", "{engine}3"),
)
def all_written(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every element of every parameter, poisoned before loading, is looked at after it."""
    promised = expected_hf(config_of(subject))
    lost = lost_towers(subject.once(stated_config_of), subject.specs) if subject.is_hf else ()
    why = partial(why_unwritten, engine, promised=promised, lost=lost)
    for report, draft in _reports(engine, subject):
        tally.compared(0, report.parameters)
        yield from _findings(engine, report.unwritten, "every element written by load_weights", why, draft)


@each_engine(
    3,
    "{engine} drops no tensor",
    rationale="Most of {engine}'s loaders skip a name that they do not know, silently: the parameter keeps what "
    "memory held.",
    fix="Follow the hint: it depends on what kind of tensor {engine} has no place for.",
    explained_by=("CK104", "CK301", "CK302"),
)
def none_dropped(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every element of every tensor of the checkpoint was written into a parameter."""
    config = config_of(subject)
    packed = subject.is_hf and bool(weights_of(config))
    expected = "written into its own parameter"
    of_cache = (
        f"{engine.label}'s class has no place for scales of the key-value cache: a cache in FP8 (--kv-cache-dtype) "
        "gets a scale of 1, one in the model's dtype needs none"
    )
    for report, draft in _reports(engine, subject):
        tally.compared(0, report.loaded_names)
        why = partial(why_dropped, engine, report=report, config=config, packed=packed)
        scales = [seen for seen in report.dropped if is_cache_scale(seen.tensor, config)]
        others = [seen for seen in report.dropped if seen not in scales]
        yield from _findings(engine, others, expected, why, draft)
        yield from _findings(engine, scales, expected, lambda seen: of_cache, draft, "warning")


@each_engine(
    4,
    "{engine} holds the checkpoint's values, bit for bit",
    rationale="A name that is known can still be loaded into the wrong place: another expert, up where gate belongs, "
    "half of a fused matrix.",
    fix="Where a Megatron checkpoint differs from its source, CK202 says which layer or expert. Otherwise report it: "
    "{engine} and ckptkit disagree.",
)
def same_values(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Before any repacking, every tensor against each place that the engine wrote it to."""
    hint = (
        "compare the checkpoint with its source (--source): if CK202 passes, the loader of "
        f"{engine.label} put these values there"
    )
    expected = "a dtype that holds the value exactly"
    harmless = "nothing is wrong with the files; convert with --dtype if the loss matters"
    for report, draft in _reports(engine, subject):
        tally.compared(report.bytes, report.tensors)
        yield from _findings(engine, report.differing, "the bits of the checkpoint", lambda seen: hint, draft)
        yield from _findings(engine, report.rounded, expected, lambda seen: harmless, draft, "warning")
    for report, draft in _reports(engine, subject):
        if report.computed and not report.differing:
            raise Unable(
                f"{draft or engine.label} computed {len(report.computed)} parameters of the tensors instead of copying "
                f"them, for one {report.computed[0]}: those were not compared"
            )


@each_engine(
    5,
    "every router is alive in {engine}",
    rationale="A router that is zero or was never written picks the same experts for every token: fluent garbage, and "
    "nothing is logged.",
    fix=f"Leave routers out of quantization: add the entry that the finding names (in most families `{KEEP_ROUTER}`) "
    "to quantization_config.ignore, and quantize again.",
    unless=without(_may_have_routers, "the model has no routed experts"),
    explained_by=("CK202", "CK204", "CK205", "CK301", "CK302", "{engine}2", "{engine}3"),
)
def routers_alive(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The router of every layer with experts, after loading: written, finite, neither zero nor constant."""
    hint = "compare it with the source (--source), and restore it from there"
    if weights_of(config_of(subject)):
        entry = keep_router(config_of(subject))
        hint = (
            f"if CK301 names it as packed, add `{entry}` to quantization_config.ignore and quantize again; else {hint}"
        )
    for report, draft in _reports(engine, subject):
        tally.compared(0, report.routers_seen)
        yield from _findings(engine, report.routers, "a router that tells experts apart", lambda seen: hint, draft)


@each_engine(
    6,
    "{engine} repacks the weights whole",
    rationale="After loading, {engine} rewrites packed weights for its kernels; whatever is lost there shows in no "
    "file and in no log.",
    fix="Check the sizes against the kernel's limits (out features % 64, in features % 128), or report it to {engine}.",
    unless=_nothing_to_repack,
)
def repacked(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Marlin's layout computed here against what the quantization methods made, and all other parameters as before."""
    expected = "the loaded values in the kernel's order"
    for report, draft in _reports(engine, subject):
        if report.repacked is None:
            if why := _all_plain(subject):  # more ranks than GPUs, so they ran on the CPU
                raise Skip(why)
            raise Unable(f"needs CUDA: {engine.label}'s repacking kernels run on a GPU only")
        tally.compared(0, report.repacked_seen)
        why_not = partial(why_not_repacked, engine)
        yield from _findings(engine, report.repacked, expected, why_not, draft)
    for report, draft in _reports(engine, subject):
        if report.unchecked and not report.repacked:
            raise Unable(
                f"{len(report.unchecked)} were repacked in ways that ckptkit cannot predict, for one "
                f"{report.unchecked[0]}" + (f" in {draft}" if draft else "")
            )


@each_engine(
    7,
    "{engine} has the parallel sizes asked for",
    rationale="A rank of a tensor-parallel engine holds slices, and its own loader cuts them: what one rank holds says "
    "little of them.",
    fix="Give {engine}'s own sizes: {sizes}. Those of Megatron are another command, with --against-megatron alone.",
    unless=without(is_parallel, "no parallel sizes were asked for"),
)
def parallel_sizes(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every rank of such an engine was loaded by its own loader, and the other checks look at all of them."""
    if engine_sizes(engine, subject) is None:
        asked = {"--tp": subject.tp, "--pp": subject.options.pp, "--ep": subject.ep, "--etp": subject.options.etp or 1}
        given = " ".join(f"{name} {size}" for name, size in asked.items() if size > 1)
        raise Unable(
            f"{engine.label} was loaded on one rank, since an engine cannot have {given}: {engine.sizes}, and tp / ep "
            "ranks cut an expert; give these sizes with --against-megatron alone"
        )
    tally.compared(0, _report(engine, subject).sizes.ranks)
    yield from ()


def _has_draft(subject: Subject) -> bool:
    config = usable_config(subject)
    return config is not None and bool(of_draft(config))


@each_engine(
    8,
    "{engine} loads the draft model",
    rationale="Speculative decoding takes the multi-token prediction layers from the same directory, by another class "
    "with names of its own: a draft model that is wrong slows every answer down and says nothing.",
    fix="Read the exception: most often `ignore` names these layers as the checkpoint does, and not as {engine}'s "
    "draft class does; some classes take one such layer alone. Or serve without speculative decoding.",
    unless=without(_has_draft, "there are no multi-token prediction layers"),
)
def loads_draft(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The engine's draft class loads the multi-token prediction layers, which the other checks then look at too."""
    report, run = _report(engine, subject), subject.once(LoadedBy(engine))
    if run.draft_crash is not None:
        hint = "serve without speculative decoding, which leaves these layers out"
        if weights_of(config_of(subject)):
            hint = f"`ckptkit lint` shows entries of `ignore` that {engine.label}'s draft class reads; or {hint}"
        expected = f"{engine.label}'s draft class is built and loads the multi-token prediction layers"
        yield Issue(expected, run.draft_crash, hint, names=report.draft, together=True)
        return
    if run.draft is None:
        raise Unable(run.draft_error or f"{engine.label} was given no tensor of the multi-token prediction layers")
    tally.compared(0, run.draft.loaded_names)
    tally.facts[f"{engine.label}'s draft model"] = [
        f"{run.draft.model}, {run.draft.loaded_names} tensors into {run.draft.parameters} parameters; embeddings and "
        f"output layer are those of {report.model}",
        *(f"it logged: {line}" for line in run.draft.log[:5]),
    ]
    yield from ()
