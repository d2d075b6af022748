"""CK501 to CK508: what real SGLang made of the checkpoint. One run of the witness serves them all."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from converters.passthrough import lost_towers
from converters.planner import dims_of, expected_hf
from verify.check import Skip, Tally, Unable, check
from verify.checks.config.engine_keys import keys_of
from verify.checks.witnesses.hints import (
    KEEP_ROUTER,
    how_shared_expert,
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
from verify.witnesses.sglang.job import Observation, SglangReport
from verify.witnesses.sglang.names import of_draft
from verify.witnesses.sglang.run import TESTED, engine_sizes, run_sglang

MODEL, DRAFT = "SGLang", "SGLang's draft model"
_OF_CACHE = (
    "SGLang's class has no place for scales of the key-value cache: a cache in FP8 (--kv-cache-dtype) gets a scale of "
    "1, one in the model's dtype needs none"
)
_NUMBER = re.compile(r"[-+]?\d[\d.e+-]*")


def no_routers(subject: Subject) -> str | None:
    """For checks of routers."""
    config = usable_config(subject)
    return "the model has no routed experts" if config is not None and not dims_of(config).experts else None


def _report(subject: Subject) -> SglangReport:
    run = subject.once(run_sglang)
    if run.unable:
        raise Unable(run.unable)
    if run.report is None:
        raise Skip("not run because SGLang did not load the checkpoint (CK501)")
    return run.report


def _reports(subject: Subject) -> Iterator[tuple[SglangReport, str]]:
    """What was seen of the model and of its draft model, where there is one, and what to call each."""
    yield _report(subject), MODEL
    if (draft := subject.once(run_sglang).draft) is not None:
        yield draft, DRAFT


def _one_rank(subject: Subject) -> str | None:
    return (
        None
        if max(subject.tp, subject.options.pp, subject.ep, subject.options.etp or 1) > 1
        else "no parallel sizes were asked for"
    )


def _nothing_to_repack(subject: Subject) -> str | None:
    """Without a GPU, unquantized weights stay as they are; with one, whatever SGLang makes of them is looked at."""
    import torch

    return None if torch.cuda.is_available() else _all_plain(subject)


def _all_plain(subject: Subject) -> str | None:
    config = usable_config(subject)
    plain = subject.kind == "megatron" or (config is not None and not is_quantized(config))
    return "no weight is quantized, so SGLang repacks none without a GPU" if plain else None


def _count(tally: Tally, tensors: int, nbytes: int = 0) -> None:
    tally.tensors += tensors
    tally.bytes += nbytes


def _findings(
    code: str,
    observations: Iterable[Observation],
    expected: str,
    hint: Callable[[Observation], str],
    severity: Severity = "error",
    where: str = MODEL,
) -> Iterator[Issue]:
    """One issue for observations whose texts and names differ in numbers only, described by the first of them."""
    kinds: dict[str, dict[str, Observation]] = defaultdict(dict)
    for seen in observations:
        kinds[f"{_NUMBER.sub('#', seen.what)} {seen.rank}"][seen.tensor] = seen
    for kind in kinds.values():
        for names in group_by_pattern(kind):
            seen = kind[names[0]]
            place = "" if seen.param == seen.tensor and where == MODEL else f", at {seen.param} in {where}"
            example = "" if len(names) == 1 else f" ({names[0]}, for one)"
            yield Issue(
                expected, seen.what + place + example, hint(seen), names=names, rank=seen.rank, severity=severity
            )


@check(
    "CK501",
    "SGLang loads the checkpoint",
    stage="sglang",
    needs=("sglang",),
    rationale="What the reader of a format refuses is no checkpoint, whatever its files look like.",
    fix="Read the exception: most often config.json describes another model than the weights, or a packed layer has "
    "the wrong group size.",
)
def loads(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """SGLang's own model class is built from the config and loaded by its own `load_weights`."""
    run = subject.once(run_sglang)
    if run.unable:
        raise Unable(run.unable)
    if run.report is None:
        said = run.crash or "it ended without a report"
        _, lacking = keys_of(subject.once(stated_config_of))
        hint = why_refused(said, lacking)
        yield Issue("SGLang's model is built and loads the weights", said, hint, file=subject.path)
        return
    report = run.report
    _count(tally, report.fed)
    untested = "" if report.version in TESTED else f" (tested are {', '.join(TESTED)})"
    facts = [f"SGLang {report.version}{untested}, {report.model}, {report.dtype}, {report.sizes}, on {report.device}"]
    facts += [f"{report.fed} tensors into {report.parameters} parameters"]
    unseen = report.draft if run.draft is None else ()
    facts += [f"of multi-token prediction layers, not looked at: {text}" for text, _ in by_pattern(unseen)]
    facts += [f"it logged: {line}" for line in report.log[:5]]
    facts += [how_shared_expert(report)] if report.model.startswith("Glm4Moe") else []
    tally.facts["SGLang"] = facts


@check(
    "CK502",
    "SGLang leaves no parameter unwritten",
    stage="sglang",
    needs=("sglang",),
    rationale="SGLang allocates parameters without filling them and never checks that all were loaded: an unwritten "
    "one serves garbage with HTTP 200.",
    fix="Give the checkpoint the tensors that the finding names, under names that SGLang knows.",
)
def all_written(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every element of every parameter, poisoned before loading, is looked at after it."""
    promised = expected_hf(config_of(subject))
    lost = lost_towers(subject.once(stated_config_of), subject.specs) if subject.kind == "hf" else ()
    expected = "every element written by load_weights"
    for report, where in _reports(subject):
        _count(tally, report.parameters)
        why = partial(why_unwritten, promised=promised, lost=lost)
        yield from _findings("CK502", report.unwritten, expected, why, where=where)


@check(
    "CK503",
    "SGLang drops no tensor",
    stage="sglang",
    needs=("sglang",),
    rationale="Most of SGLang's loaders skip a name that they do not know, without a word: the parameter keeps what "
    "memory held.",
    fix="Follow the hint: it depends on what kind of tensor SGLang has no place for.",
)
def none_dropped(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every element of every tensor of the checkpoint was written into a parameter."""
    config = config_of(subject)
    packed = subject.kind == "hf" and bool(weights_of(config))
    for report, where in _reports(subject):
        _count(tally, report.fed)
        why, expected = (
            partial(why_dropped, report=report, config=config, packed=packed),
            "written into its own parameter",
        )
        scales = [seen for seen in report.dropped if is_cache_scale(seen.tensor, config)]
        others = [seen for seen in report.dropped if seen not in scales]
        yield from _findings("CK503", others, expected, why, where=where)
        yield from _findings("CK503", scales, expected, lambda seen: _OF_CACHE, "warning", where)


@check(
    "CK504",
    "SGLang holds the checkpoint's values, bit for bit",
    stage="sglang",
    needs=("sglang",),
    rationale="A name that is known can still be loaded into the wrong place: another expert, up where gate belongs, "
    "half of a fused matrix.",
    fix="Where a Megatron checkpoint differs from its source, CK202 says which layer or expert. Otherwise report it: "
    "SGLang and ckptkit disagree.",
)
def same_values(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Before any repacking, every tensor against each place that SGLang wrote it to."""
    hint = (
        "the values went into the wrong place, or the tensor was changed on the way: convert again, and compare "
        "with --source"
    )
    expected = "a dtype that holds the value exactly"
    harmless = "nothing is wrong with the files; convert with --dtype if the loss matters"
    for report, where in _reports(subject):
        _count(tally, report.tensors, report.bytes)
        yield from _findings("CK504", report.differing, "the bits of the checkpoint", lambda seen: hint, where=where)
        yield from _findings("CK504", report.rounded, expected, lambda seen: harmless, "warning", where)
    for report, where in _reports(subject):
        if report.computed and not report.differing:
            raise Unable(
                f"{where} computed {len(report.computed)} parameters of the tensors instead of copying them, "
                f"for one {report.computed[0]}: those were not compared"
            )


@check(
    "CK505",
    "every router is alive in SGLang",
    stage="sglang",
    needs=("sglang",),
    rationale="A router that is zero or was never written picks the same experts for every token: fluent garbage, and "
    "nothing is logged.",
    fix=f"Leave routers out of quantization: add the entry that the finding names (in most families `{KEEP_ROUTER}`) "
    "to quantization_config.ignore, and quantize again.",
    unless=no_routers,
)
def routers_alive(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The router of every layer with experts, after loading: written, finite, neither zero nor constant."""
    hint = (
        f"if the router was packed, add `{keep_router(config_of(subject))}` to quantization_config.ignore and quantize "
        "again; else restore it from the source"
    )
    for report, where in _reports(subject):
        _count(tally, report.routers_seen)
        yield from _findings(
            "CK505", report.routers, "a router that tells experts apart", lambda seen: hint, where=where
        )


@check(
    "CK506",
    "SGLang repacks the weights whole",
    stage="sglang",
    needs=("sglang",),
    rationale="After loading, SGLang rewrites packed weights for its kernels; whatever is lost there shows in no file "
    "and in no log.",
    fix="Check the sizes against the kernel's limits (out features % 64, in features % 128), or report it to SGLang.",
    unless=_nothing_to_repack,
)
def repacked(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Marlin's layout computed here against what the quantization methods made, and all other parameters as before."""
    expected = "the loaded values in the kernel's order"
    for report, where in _reports(subject):
        if report.repacked is None:
            if why := _all_plain(subject):  # more ranks than GPUs, so they ran on the CPU
                raise Skip(why)
            raise Unable("needs CUDA: SGLang's repacking kernels run on a GPU only")
        _count(tally, report.repacked_seen)
        yield from _findings("CK506", report.repacked, expected, why_not_repacked, where=where)
    for report, where in _reports(subject):
        if report.unchecked and not report.repacked:
            raise Unable(
                f"{len(report.unchecked)} were repacked in ways that ckptkit cannot predict, for one "
                f"{report.unchecked[0]}" + (f" in {where}" if where == DRAFT else "")
            )


@check(
    "CK507",
    "SGLang has the parallel sizes asked for",
    stage="sglang",
    needs=("sglang",),
    rationale="A rank of a tensor-parallel engine holds slices, and its own loader cuts them: what one rank holds says "
    "little of them.",
    fix="Give SGLang's own sizes: --ep divides --tp, there is no --pp. Those of Megatron are another command, with "
    "--against-megatron alone.",
    unless=_one_rank,
)
def parallel_sizes(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every rank of an engine of these sizes was loaded by its own loader, and CK501 to CK506 are about all of them."""
    if engine_sizes(subject) is None:
        asked = {"--tp": subject.tp, "--pp": subject.options.pp, "--ep": subject.ep, "--etp": subject.options.etp or 1}
        said = " ".join(f"{name} {size}" for name, size in asked.items() if size > 1)
        raise Unable(
            f"SGLang was loaded on one rank, since an engine cannot have {said}: --ep divides --tp, and tp / ep ranks "
            "cut an expert; give these sizes with --against-megatron alone"
        )
    _count(tally, _report(subject).sizes.tp)
    yield from ()


def _no_draft(subject: Subject) -> str | None:
    config = usable_config(subject)
    return None if config is not None and of_draft(config) else "there are no multi-token prediction layers"


@check(
    "CK508",
    "SGLang loads the draft model",
    stage="sglang",
    needs=("sglang",),
    rationale="Speculative decoding takes the multi-token prediction layers from the same directory, by another class "
    "with names of its own: a draft model that is wrong slows every answer down and says nothing.",
    fix="Read the exception: most often `ignore` names these layers as the checkpoint does, and not as SGLang's draft "
    "class does; some classes take one such layer alone. Or serve without speculative decoding.",
    unless=_no_draft,
)
def loads_draft(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """SGLang's draft class loads the multi-token prediction layers, which CK502 to CK506 then look at too."""
    report, run = _report(subject), subject.once(run_sglang)
    if run.draft_crash is not None:
        hint = (
            "see CK302 and `ckptkit lint` for an entry of `ignore` that SGLang's draft class reads; or serve without "
            "speculative decoding, which leaves these layers out"
        )
        yield Issue(
            "SGLang's draft class is built and loads the multi-token prediction layers",
            run.draft_crash,
            hint,
            names=report.draft,
            file=subject.path,
            together=True,
        )
        return
    if run.draft is None:
        raise Unable(run.undrafted or "SGLang was given no tensor of the multi-token prediction layers")
    _count(tally, run.draft.fed)
    tally.facts["SGLang's draft model"] = [
        f"{run.draft.model}, {run.draft.fed} tensors into {run.draft.parameters} parameters; embeddings and output "
        f"layer are those of {report.model}",
        *(f"it logged: {line}" for line in run.draft.log[:5]),
    ]
    yield from ()
