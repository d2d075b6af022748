"""CK501 to CK508: what a real engine made of the checkpoint. One run of each engine serves all of its checks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, update_wrapper
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ckptkit.converters.config.values import language_part
from ckptkit.converters.passthrough import lost_towers
from ckptkit.converters.planner import dims_of, expected_hf
from ckptkit.core.specs import summarize
from ckptkit.quant.formats.part_names import INT4_ENDINGS, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SCALE_INV
from ckptkit.quant.ignore.names import entry_for
from ckptkit.verify.checks.config.config import is_parallel
from ckptkit.verify.checks.config.spellings import in_words, keys_of
from ckptkit.verify.core.catalogue import wording_of
from ckptkit.verify.core.check import AppliesTo, Run, Tally, check, where
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import Severity
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import (
    config_of,
    is_cache_scale,
    is_quantized,
    stated_config_of,
    usable_config,
    weights_of,
)
from ckptkit.verify.evidence.folding import LAYER, group_by_pattern
from ckptkit.verify.quirks import quirks
from ckptkit.verify.witnesses.loading.engine import EngineFacts
from ckptkit.verify.witnesses.loading.job import NUMBER, LoadReport, Observation
from ckptkit.verify.witnesses.loading.names import of_draft, routers
from ckptkit.verify.witnesses.loading.run import engine_sizes, interpreter_of, run_engine_load
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.registry import ENGINES
from ckptkit.verify.witnesses.runner import inconclusive

if TYPE_CHECKING:  # each adapter is held to the protocol
    from ckptkit.verify.witnesses.loading.engine import Engine
    from ckptkit.verify.witnesses.sglang import adapter as sglang
    from ckptkit.verify.witnesses.vllm import adapter as vllm

    _ADAPTERS: tuple[Engine, ...] = (sglang, vllm)

_NO_KEY = re.compile(r"'\w*Config\w*' object has no attribute '(\w+)'")
KEEP_ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"  # in most families; `keep_router` has each one's own


Issues = Callable[[EngineFacts, Subject, Tally], Iterator[Issue]]


def each_engine(
    number: int,
    *,
    applies_to: AppliesTo | None = None,
    explained_by: Sequence[str] = (),
) -> Callable[[Issues], dict[str, Run]]:
    """Registers a check once for every engine; `{engine}` in its wording is what it is called.

    In `explained_by` `{engine}3` is the third check of the same engine.
    """

    def register(issues: Issues) -> dict[str, Run]:
        return {
            engine.name: check(
                f"{engine.codes}{number}",
                stage=engine.name,
                wording=wording_of(f"{ENGINES[0].codes}{number}", engine=engine.label, sizes=engine.sizes),
                needs=(engine.name,),
                applies_to=applies_to,
                explained_by=tuple(code.format(engine=engine.codes) for code in explained_by),
            )(update_wrapper(partial(issues, engine), issues))
            for engine in ENGINES
        }

    return register


def _report(engine: EngineFacts, subject: Subject) -> LoadReport:
    run = run_engine_load(subject, engine)
    if run.report is None:
        _refusal(run.failure)
        raise CannotCheck(f"not run because {engine.label} did not load the checkpoint", f"{engine.codes}1")
    return run.report


def _refusal(failure: ExitReport | None) -> str:
    """The words in which an engine refused the checkpoint. Raises CannotCheck for any other failure."""
    if failure is None or not failure.verdict:
        raise inconclusive("the witness failed", failure)
    return failure.message


def _reports(engine: EngineFacts, subject: Subject) -> Iterator[tuple[LoadReport, str | None]]:
    """What was seen of the model and of its draft model, where there is one, with the name of the latter."""
    report = _report(engine, subject)
    yield report, None
    if report.draft_model is not None:
        yield report.draft_model, f"{engine.label}'s draft model"


def _may_repack(subject: Subject) -> None:
    """Without a GPU, unquantized weights stay as they are; with one, whatever SGLang makes of them is looked at."""
    if find_spec("torch") is not None:  # else SGLang's check says what is missing
        import torch

        if torch.cuda.is_available():
            return
    _require_packed(subject)


def _require_packed(subject: Subject) -> None:
    config = usable_config(subject)
    if subject.is_megatron or (config is not None and not is_quantized(config)):
        raise NotApplicable("no weight is quantized, so none is repacked without a GPU")


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
        kinds[f"{NUMBER.sub('#', seen.what)} {seen.rank}"][seen.tensor] = seen
    for kind in kinds.values():
        for names in group_by_pattern(kind):
            seen = kind[names[0]]
            as_named = seen.param == seen.tensor and draft is None
            place = "" if as_named else f", at {seen.param} in {draft or engine.label}"
            example = "" if len(names) == 1 else f" ({names[0]}, for one)"
            actual, move = seen.what + place + example, hint(seen)
            yield Issue(expected, actual, move, names=names, rank=seen.rank, severity=severity, file=None)


@each_engine(1)
def loads(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The engine's own model class is built from the config and loaded by its own `load_weights`."""
    run = run_engine_load(subject, engine)
    if run.report is None:
        message = _refusal(run.failure)
        _, lacking = keys_of(stated_config_of(subject))
        hint = why_refused(engine, message, lacking)
        yield Issue(f"{engine.label}'s model is built and loads the weights", message, hint)
        return
    report = run.report
    tally.compared(report.loaded_names)
    untested = "" if report.version in engine.tested else f" (tested are {', '.join(engine.tested)})"
    release = f"{engine.label} {report.version}{untested}"
    facts = [f"{release}, {report.model}, {report.dtype}, {report.sizes}, on {report.device}"]
    facts += [f"{report.loaded_names} tensors into {report.parameters} parameters"]
    not_seen = report.draft if report.draft_model is None else ()
    drafts = map(summarize, group_by_pattern(not_seen))
    facts += [f"of multi-token prediction layers, not looked at: {text}" for text in drafts]
    facts += [f"it logged: {line}" for line in report.log[:5]]
    clashes, python = quirks(engine.name, "clashes", report.version), interpreter_of(engine, subject)
    facts += [known.message for known in clashes if python.release(known.when["package"])]
    for names in group_by_pattern(report.requantized):
        change = f"by up to {max(report.requantized[name] for name in names):.1%} of a block's largest value"
        facts.append(f"requantized for its kernel: {summarize(names)}, {change}")
    tally.facts[engine.label] = facts


@each_engine(2, explained_by=("CK104", "CK301", "CK302", "{engine}3"))
def all_written(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every element of every parameter, poisoned before loading, is looked at after it."""
    promised = expected_hf(config_of(subject))
    lost = lost_towers(stated_config_of(subject), subject.specs) if subject.is_hf else ()
    why = partial(why_unwritten, engine, promised=promised, lost=lost)
    for report, draft in _reports(engine, subject):
        tally.compared(report.parameters)
        yield from _findings(engine, report.unwritten, "every element written by load_weights", why, draft)


@each_engine(3, explained_by=("CK104", "CK301", "CK302"))
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
        tally.compared(report.loaded_names)
        why = partial(why_dropped, engine, report=report, config=config, packed=packed)
        scales = [seen for seen in report.dropped if is_cache_scale(seen.tensor, config)]
        others = [seen for seen in report.dropped if seen not in scales]
        yield from _findings(engine, others, expected, why, draft)
        yield from _findings(engine, scales, expected, lambda seen: of_cache, draft, "warning")


@each_engine(4)
def values_in_engine(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Before any repacking, every tensor against each place that the engine wrote it to."""
    expected = "a dtype that holds the value exactly"
    harmless = "nothing is wrong with the files; convert with --dtype if the loss matters"
    for report, draft in _reports(engine, subject):
        tally.compared(report.tensors, nbytes=report.bytes)
        yield from _findings(engine, report.differing, "the bits of the checkpoint", lambda seen: "", draft)
        yield from _findings(engine, report.rounded, expected, lambda seen: harmless, draft, "warning")
    for report, draft in _reports(engine, subject):
        if report.computed and not report.differing:
            raise CannotCheck(
                f"{draft or engine.label} computed {len(report.computed)} parameters of the tensors instead of copying "
                f"them, for one {report.computed[0]}: those were not compared"
            )


@each_engine(
    5,
    applies_to=where(
        lambda subject: (config := usable_config(subject)) is None or dims_of(config).experts > 0,
        "the model has no routed experts",
    ),
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
        tally.compared(report.routers_seen)
        yield from _findings(engine, report.routers, "a router that tells experts apart", lambda seen: hint, draft)


@each_engine(6, applies_to=_may_repack)
def repacked(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Marlin's layout computed here against what the quantization methods made, and all other parameters as before."""
    expected = "the loaded values in the kernel's order"
    for report, draft in _reports(engine, subject):
        if report.repacked is None:
            _require_packed(subject)  # more ranks than GPUs, so they ran on the CPU
            without = f"--accept {engine.codes}6 goes on without this"
            raise CannotCheck(f"needs CUDA: {engine.label}'s repacking kernels run on a GPU only; {without}")
        tally.compared(report.repacked_seen)
        why_not = partial(why_not_repacked, engine, report.version)
        yield from _findings(engine, report.repacked, expected, why_not, draft)
    for report, draft in _reports(engine, subject):
        if report.unchecked and not report.repacked:
            raise CannotCheck(
                f"{len(report.unchecked)} were repacked in ways that ckptkit cannot predict, for one "
                f"{report.unchecked[0]}" + (f" in {draft}" if draft else "")
            )


@each_engine(7, applies_to=where(is_parallel, "no parallel sizes were asked for"))
def parallel_sizes(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every rank of such an engine was loaded by its own loader, and the other checks look at all of them."""
    if engine_sizes(engine, subject) is None:
        asked = {"--tp": subject.tp, "--pp": subject.options.pp, "--ep": subject.ep, "--etp": subject.options.etp or 1}
        given = " ".join(f"{name} {size}" for name, size in asked.items() if size > 1)
        raise CannotCheck(
            f"{engine.label} was loaded on one rank, since an engine cannot have {given}: {engine.sizes}, and tp / ep "
            "ranks cut an expert; give these sizes with --against-megatron alone"
        )
    tally.compared(_report(engine, subject).sizes.ranks)
    yield from ()


@each_engine(
    8,
    applies_to=where(
        lambda subject: (config := usable_config(subject)) is not None and of_draft(config),
        "there are no multi-token prediction layers",
    ),
)
def loads_draft(engine: EngineFacts, subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The engine's draft class loads the multi-token prediction layers, which the other checks then look at too."""
    report, failure = _report(engine, subject), run_engine_load(subject, engine).failure
    draft = report.draft_model
    if failure is not None and failure.verdict:
        hint = "serve without speculative decoding, which leaves these layers out"
        if weights_of(config_of(subject)):
            hint = f"`ckptkit lint` shows entries of `ignore` that {engine.label}'s draft class reads; or {hint}"
        expected = f"{engine.label}'s draft class is built and loads the multi-token prediction layers"
        yield Issue(expected, str(failure), hint, names=report.draft, together=True)
        return
    if draft is None:
        nothing = f"{engine.label} was given no tensor of the multi-token prediction layers"
        raise CannotCheck(f"the draft model was not looked at: {failure}" if failure else nothing)
    tally.compared(draft.loaded_names)
    tally.facts[f"{engine.label}'s draft model"] = [
        f"{draft.model}, {draft.loaded_names} tensors into {draft.parameters} parameters; embeddings and "
        f"output layer are those of {report.model}",
        *(f"it logged: {line}" for line in draft.log[:5]),
    ]
    yield from ()


def keep_router(config: Mapping[str, Any]) -> str:
    """The entry of `ignore` that leaves out this model's routers, as its releases name them."""
    return entry_for(routers(config)[0].removesuffix(".weight"))


def why_refused(engine: EngineFacts, message: str, lacking: Mapping[str, Any]) -> str:
    """The next move where an engine did not load the model; `lacking`: keys that config.json needs (CK731)."""
    if (match := _NO_KEY.search(message)) is None:
        return f"compare config.json with the release; run `{engine.server}` on the directory to see the whole log"
    release = "take config.json from the release: transformers 5 writes the keys that its own class knows"
    for key, value in lacking.items():
        if key.rpartition(".")[2] == match[1]:
            return f"add {in_words({key: value})} to config.json, or {release}"
    return f"{engine.label} reads {match[1]} of config.json, which does not have it: {release}"


def why_unwritten(engine: EngineFacts, seen: Observation, promised: Collection[str], lost: Collection[str] = ()) -> str:
    """The next move for a parameter that was not written; `lost`: what the checkpoint lacks of a vision tower."""
    if lost and seen.tensor not in promised:
        return "the checkpoint lacks a part of the vision tower, which CK730 names: copy its tensors from the release"
    if seen.tensor == seen.param and seen.tensor not in promised:
        return (
            f"{engine.label}'s class has a parameter that config.json promises no tensor for: it builds that layer "
            f"otherwise; {engine.codes}3 says which tensors it drops"
        )
    return f"the tensor is missing from the checkpoint, or {engine.codes}3 says under which name it was dropped"


def why_dropped(
    engine: EngineFacts, seen: Observation, report: LoadReport, config: Mapping[str, Any], packed: bool
) -> str:
    """The next move for a tensor that was dropped; `packed`: of a quantized checkpoint."""
    if seen.original is not None:
        return (
            f"{engine.label}'s draft model shares embeddings and output layer with the model: make the copies equal to "
            "them, or leave them out"
        )
    if seen.tensor.endswith(f".{WEIGHT_SCALE_INV}"):
        return why_no_scale(engine, seen.tensor, report)
    name = f"{engine.label}'s {report.model}"
    dense = _why_no_dense_layer(seen, name, config)
    return dense or (_why_unpacked(engine, seen.tensor, config) if packed else None) or _why_unknown(seen, name)


def _why_unpacked(engine: EngineFacts, name: str, config: Mapping[str, Any]) -> str | None:
    """The hint where an engine wants the tensor quantized and it is not, or the other way round."""
    module = name.rpartition(".")[0]
    own = (routers(config), routers(config, draft=True))
    if name.endswith(INT4_ENDINGS) and any(f"{module}.weight" in several for several in own):
        return (
            f"{engine.label} builds the router unquantized and silently ignores packed tensors for it; "
            f"add `{keep_router(config)}` to quantization_config.ignore and leave the router in its own dtype"
        )
    if name.endswith(INT4_ENDINGS):
        return (
            f"{engine.label} builds {module} unquantized: store it unquantized and keep it in "
            "quantization_config.ignore"
        )
    if name.endswith("_proj.weight"):
        return (
            f"{engine.label} builds {module} quantized: pack it, or ignore it by a regex that also matches the fused "
            "name (qkv_proj, gate_up_proj)"
        )
    return None


def why_no_scale(engine: EngineFacts, name: str, report: LoadReport) -> str:
    """The hint for scales of FP8 blocks: the engine's class loads none at all, or not those of this module."""
    if not any(one.endswith(f".{WEIGHT_SCALE_INV}") for one in report.equal):
        return (
            f"{engine.label}'s {report.model} loads no scales of FP8 blocks under this name: dequantize it, or "
            "quantize the plain release with `ckptkit quantize --scheme fp8-channel`"
        )
    module = name.rpartition(".")[0]
    return (
        f"{engine.label} builds {module} without FP8: store it in BF16 and name it in modules_to_not_convert of "
        "config.json"
    )


def _why_no_dense_layer(seen: Observation, model: str, config: Mapping[str, Any]) -> str | None:
    """The hint for a dense MLP where the engine's class builds experts all the same."""
    config = language_part(config)
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
        f"{model} has no parameter {seen.param}: it does not read {key} of config.json and builds experts in "
        f"layer {number}, so it cannot serve this model"
    )


def _why_unknown(seen: Observation, model: str) -> str:
    if seen.tensor.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return "engines read one tensor an expert: save with save_original_format=True, or convert to Megatron and back"
    if "elements were written" in seen.what:
        return (
            f"{model} builds {seen.param} smaller than the tensor and leaves out the rest: compare the sizes "
            "in config.json with the release; a class may not read all of them (head_dim, for one)"
        )
    unknown = f"{model} has no parameter {seen.param}"
    return f"{unknown}: compare architectures in config.json and the name of the tensor with the release"


def why_not_repacked(engine: EngineFacts, release: str, seen: Observation) -> str:
    """The next move for a parameter that was repacked wrongly."""
    param = seen.param.partition("[")[0]
    for known in quirks(engine.name, "misorders", release):
        if known.is_about(param, {}):
            return known.message
    if param.endswith((WEIGHT_PACKED, WEIGHT_SCALE)):
        return (
            "the sizes may be outside the kernel's limits; try another group size, or load with an unquantized "
            "checkpoint to compare"
        )
    return f"the kernel's limits are not the cause: please report it, with the version of {engine.label}"
