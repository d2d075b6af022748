"""CK501 to CK507: what real SGLang made of the checkpoint. One run of the witness serves them all."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from converters.planner import dims_of, expected_hf
from quant.formats.part_names import INT4_ENDINGS, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SCALE_INV
from verify.check import Skip, Tally, Unable, check
from verify.evidence.expected import config_of, is_quantized, usable_config, weights_of
from verify.evidence.folding import LAYER, alike, by_pattern
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.report import Severity
from verify.witnesses.sglang.job import Observation, SglangReport
from verify.witnesses.sglang.run import TESTED, engine_sizes, run_sglang

KEEP_ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"
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


def _one_rank(subject: Subject) -> str | None:
    return None if max(subject.tp, subject.pp, subject.ep, subject.etp or 1) > 1 else "no parallel sizes were asked for"


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
) -> Iterator[Issue]:
    """One issue for observations whose texts and names differ in numbers only, described by the first of them."""
    kinds: dict[str, dict[str, Observation]] = defaultdict(dict)
    for seen in observations:
        kinds[f"{_NUMBER.sub('#', seen.what)} {seen.rank}"][seen.tensor] = seen
    for kind in kinds.values():
        for names in alike(kind):
            seen = kind[names[0]]
            place = "" if seen.param == seen.tensor else f", at {seen.param} in SGLang"
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
        hint = (
            "compare config.json with the release; run `python -m sglang.launch_server` on the directory to see "
            "the whole log"
        )
        yield Issue(
            "SGLang's model is built and loads the weights",
            run.crash or "it ended without a report",
            hint,
            file=subject.path,
        )
        return
    report = run.report
    _count(tally, report.fed)
    untested = "" if report.version in TESTED else f" (tested are {', '.join(TESTED)})"
    facts = [f"SGLang {report.version}{untested}, {report.model}, {report.dtype}, {report.sizes}, on {report.device}"]
    facts += [f"{report.fed} tensors into {report.parameters} parameters"]
    facts += [f"left to the draft model: {text}" for text, _ in by_pattern(report.draft)]
    facts += [f"it logged: {line}" for line in report.log[:5]]
    facts += [_fusion(report)] if report.model.startswith("Glm4Moe") else []
    tally.facts["SGLang"] = facts


def _fusion(report: SglangReport) -> str:
    if report.fused_shared:
        return (
            "the packed shared expert needs SGLang's fusion of shared experts: start the server without "
            "--disable-shared-experts-fusion"
        )
    return (
        "loaded as with --disable-shared-experts-fusion, which the server needs too where routed experts are INT4 "
        "and the shared one is not"
    )


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
    report = _report(subject)
    _count(tally, report.parameters)
    promised = expected_hf(config_of(subject))
    yield from _findings(
        "CK502", report.unwritten, "every element written by load_weights", lambda seen: _why_unwritten(seen, promised)
    )


def _why_unwritten(seen: Observation, promised: Collection[str]) -> str:
    if seen.tensor == seen.param and seen.tensor not in promised:
        return (
            "SGLang's class has a parameter that config.json promises no tensor for: it builds that layer "
            "otherwise; CK503 says which tensors it drops"
        )
    return (
        "the tensor is missing from the checkpoint, or CK503 says under which name it was dropped; convert or "
        "quantize again"
    )


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
    report = _report(subject)
    _count(tally, report.fed)
    config = config_of(subject)
    packed = subject.kind == "hf" and bool(weights_of(config))

    def why(seen: Observation) -> str:
        if seen.tensor.endswith(f".{WEIGHT_SCALE_INV}"):
            return _why_no_scale(seen.tensor, report)
        dense = _why_no_dense_layer(seen, report.model, config)
        return dense or (_why_unpacked(seen.tensor) if packed else None) or _why_unknown(seen, report.model)

    yield from _findings("CK503", report.dropped, "written into its own parameter", why)


def _why_unpacked(name: str) -> str | None:
    """The hint where SGLang wants the tensor quantized and it is not, or the other way round."""
    module = name.rpartition(".")[0]
    if name.endswith(INT4_ENDINGS) and module.endswith(".mlp.gate"):
        return (
            "SGLang builds the router unquantized and silently ignores packed tensors for it; "
            f"add `{KEEP_ROUTER}` to quantization_config.ignore and leave the router in its own dtype"
        )
    if name.endswith(INT4_ENDINGS):
        return f"SGLang builds {module} unquantized: store it unpacked and keep it in quantization_config.ignore"
    if name.endswith("_proj.weight"):
        return (
            f"SGLang builds {module} quantized: pack it, or ignore it by a regex that also matches the fused name "
            "(qkv_proj, gate_up_proj)"
        )
    return None


def _why_no_scale(name: str, report: SglangReport) -> str:
    """The hint for scales of FP8 blocks: SGLang's class loads none at all, or not those of this module."""
    if not any(one.endswith(f".{WEIGHT_SCALE_INV}") for one in report.equal):
        return (
            f"SGLang's {report.model} loads no scales of FP8 blocks, so it cannot serve the model in FP8: dequantize it"
        )
    module = name.rpartition(".")[0]
    return f"SGLang builds {module} without FP8: store it in BF16 and name it in modules_to_not_convert of config.json"


def _why_no_dense_layer(seen: Observation, model: str, config: Mapping[str, Any]) -> str | None:
    """The hint for a dense MLP where SGLang's class builds experts all the same."""
    config = config.get("text_config") or config
    layer = LAYER.match(seen.tensor)
    if not layer or ".mlp." not in seen.tensor or "elements were written" in seen.what:
        return None
    number = int(layer[1])
    if number in (config.get("mlp_only_layers") or ()):
        key = "mlp_only_layers"
    elif (number + 1) % (config.get("decoder_sparse_step") or 1):
        key = "decoder_sparse_step"
    else:
        return None
    return (
        f"SGLang's {model} has no parameter {seen.param}: it does not read {key} of config.json and builds experts in "
        f"layer {number}, so it cannot serve this model"
    )


def _why_unknown(seen: Observation, model: str) -> str:
    if seen.tensor.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return "SGLang reads one tensor an expert: save with save_original_format=True, or convert to Megatron and back"
    if "elements were written" in seen.what:
        return (
            f"SGLang's {model} builds {seen.param} smaller than the tensor and leaves out the rest: compare the sizes "
            "in config.json with the release; a class may not read all of them (head_dim, for one)"
        )
    unknown = f"SGLang's {model} has no parameter {seen.param}"
    return f"{unknown}: compare model_type and num_hidden_layers with the release, or remove the tensor"


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
    report = _report(subject)
    if report.computed and not report.differing:
        raise Unable(
            f"SGLang computed {len(report.computed)} parameters of the tensors instead of copying them, "
            f"for one {report.computed[0]}: those were not compared"
        )
    _count(tally, report.tensors, report.bytes)
    hint = (
        "the values went into the wrong place, or the tensor was changed on the way: convert again, and compare "
        "with --source"
    )
    yield from _findings("CK504", report.differing, "the bits of the checkpoint", lambda seen: hint)
    expected = "a dtype that holds the value exactly"
    harmless = "nothing is wrong with the files; convert with --dtype if the loss matters"
    yield from _findings("CK504", report.rounded, expected, lambda seen: harmless, "warning")


@check(
    "CK505",
    "every router is alive in SGLang",
    stage="sglang",
    needs=("sglang",),
    rationale="A router that is zero or was never written picks the same experts for every token: fluent garbage, and "
    "nothing is logged.",
    fix=f"Leave routers out of quantization: add `{KEEP_ROUTER}` to quantization_config.ignore and quantize again.",
    unless=no_routers,
)
def routers_alive(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The router of every layer with experts, after loading: written, finite, neither zero nor constant."""
    report = _report(subject)
    _count(tally, report.routers_seen)
    hint = (
        f"if the router was packed, add `{KEEP_ROUTER}` to quantization_config.ignore and quantize again; else "
        "restore it from the source"
    )
    yield from _findings("CK505", report.routers, "a router that tells experts apart", lambda seen: hint)


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
    report = _report(subject)
    if report.repacked is None:
        if why := _all_plain(subject):  # more ranks than GPUs, so they ran on the CPU
            raise Skip(why)
        raise Unable("needs CUDA: SGLang's repacking kernels run on a GPU only")
    if report.unchecked and not report.repacked:
        raise Unable(
            f"{len(report.unchecked)} were repacked in ways that ckptkit cannot predict, for one {report.unchecked[0]}"
        )
    _count(tally, report.repacked_seen)
    yield from _findings("CK506", report.repacked, "the loaded values in the kernel's order", _why_not_repacked)


def _why_not_repacked(seen: Observation) -> str:
    if seen.param.partition("[")[0].endswith((WEIGHT_PACKED, WEIGHT_SCALE)):
        return (
            "the sizes may be outside the kernel's limits; try another group size, or load with an unquantized "
            "checkpoint to compare"
        )
    return "the kernel's limits are not the cause: please report it, with the version of SGLang"


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
        asked = {"--tp": subject.tp, "--pp": subject.pp, "--ep": subject.ep, "--etp": subject.etp or 1}
        said = " ".join(f"{name} {size}" for name, size in asked.items() if size > 1)
        raise Unable(
            f"SGLang was loaded on one rank, since an engine cannot have {said}: --ep divides --tp, and tp / ep ranks "
            "cut an expert; give these sizes with --against-megatron alone"
        )
    _count(tally, _report(subject).sizes.tp)
    yield from ()
