"""CK501 to CK508: the checkpoint in the loader of a real engine. All checks of an engine share one run."""

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
from ckptkit.verify.checks.config.spellings import format_keys, keys_of
from ckptkit.verify.core.catalogue import wording_of
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Run, Severity, Subject, check, only_if
from ckptkit.verify.core.report import CheckResult
from ckptkit.verify.evidence.expected import (
    config_of,
    config_or_none,
    is_cache_scale,
    is_quantized,
    raw_config_of,
    weights_of,
)
from ckptkit.verify.evidence.folding import LAYER, group_by_pattern
from ckptkit.verify.quirks import quirks
from ckptkit.verify.witnesses.loading.engine import EngineFacts
from ckptkit.verify.witnesses.loading.job import NUMBER, LoadReport, Observation
from ckptkit.verify.witnesses.loading.names import draft_prefixes, routers
from ckptkit.verify.witnesses.loading.run import engine_sizes, interpreter_of, run_engine_load
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.registry import ENGINES
from ckptkit.verify.witnesses.runner import inconclusive

if TYPE_CHECKING:  # each adapter must implement the protocol
    from ckptkit.verify.witnesses.loading.engine import Engine
    from ckptkit.verify.witnesses.sglang import adapter as sglang
    from ckptkit.verify.witnesses.vllm import adapter as vllm

    _ADAPTERS: tuple[Engine, ...] = (sglang, vllm)

_NO_KEY = re.compile(r"'\w*Config\w*' object has no attribute '(\w+)'")
KEEP_ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"  # in most families; `keep_router` returns that of a model
Issues = Callable[[EngineFacts, Subject, CheckResult], Iterator[Issue]]


def each_engine(
    number: int, *, applies_to: Callable[[Subject], object] | None = None, explained_by: Sequence[str] = ()
) -> Callable[[Issues], dict[str, Run]]:
    """Registers a check for every engine; in `explained_by`, `{engine}3` is the third check of the same engine."""

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
    """The message of an engine that refused the checkpoint. Raises CannotCheck for any other failure."""
    if failure is None or not failure.verdict:
        raise inconclusive("the process that loads the checkpoint failed", failure)
    return failure.message


def _reports(engine: EngineFacts, subject: Subject) -> Iterator[tuple[LoadReport, str | None]]:
    """The reports of the model and, with its name, of the draft model, if there is one."""
    report = _report(engine, subject)
    yield report, None
    if report.draft_model is not None:
        yield report.draft_model, f"{engine.label}'s draft model"


def _may_repack(subject: Subject) -> None:
    """Without a GPU, only quantized weights are repacked."""
    if find_spec("torch") is not None:  # SGLang's check reports that it is missing
        import torch

        if torch.cuda.is_available():
            return
    _require_packed(subject)


def _require_packed(subject: Subject) -> None:
    config = config_or_none(subject)
    if subject.kind == "megatron" or (config is not None and not is_quantized(config)):
        raise NotApplicable("without a GPU only quantized weights are repacked, and the checkpoint has none")


def _findings(
    engine: EngineFacts,
    observations: Iterable[Observation],
    expected: str,
    hint: Callable[[Observation], str],
    draft: str | None,
    severity: Severity = "error",
) -> Iterator[Issue]:
    """One issue for observations with texts and names that differ only in numbers, described by the first."""
    kinds: dict[str, dict[str, Observation]] = defaultdict(dict)
    for seen in observations:
        kinds[f"{NUMBER.sub('#', seen.what)} {seen.rank}"][seen.tensor] = seen
    for kind in kinds.values():
        for names in group_by_pattern(kind):
            seen = kind[names[0]]
            is_same_name = seen.param == seen.tensor and draft is None
            place = "" if is_same_name else f", in parameter {seen.param} of {draft or engine.label}"
            actual = seen.what + place + ("" if len(names) == 1 else f" (for example {names[0]})")
            yield Issue(expected, actual, hint(seen), names=names, rank=seen.rank, severity=severity, file=None)


@each_engine(1)
def loads(engine: EngineFacts, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The engine's model class is built from the config, and its `load_weights` loads the checkpoint."""
    run = run_engine_load(subject, engine)
    if run.report is None:
        message = _refusal(run.failure)
        _, lacking = keys_of(raw_config_of(subject))
        yield Issue(f"{engine.label} loads the model", message, why_refused(engine, message, lacking))
        return
    report = run.report
    result.compared(report.loaded_names)
    untested = "" if report.version in engine.tested else f" (ckptkit is tested with {', '.join(engine.tested)})"
    release = f"{engine.label} {report.version}{untested}"
    facts = [f"{release}, {report.model}, {report.dtype}, {report.sizes}, on {report.device}"]
    facts += [f"loaded {report.loaded_names} tensors into {report.parameters} parameters"]
    drafts = map(summarize, group_by_pattern(report.draft if report.draft_model is None else ()))
    facts += [f"tensors of multi-token prediction layers that were not checked: {text}" for text in drafts]
    facts += [f"{engine.label} logged: {line}" for line in report.log[:5]]
    clashes, python = quirks(engine.name, "clashes", report.version), interpreter_of(engine, subject)
    facts += [known.message for known in clashes if python.release(known.when["package"])]
    for names in group_by_pattern(report.requantized):
        change = f"up to {max(report.requantized[name] for name in names):.1%} of a block's largest value"
        facts.append(f"{engine.label} quantizes {summarize(names)} again for its kernel, which changes {change}")
    result.facts[engine.label] = facts


@each_engine(2, explained_by=("CK104", "CK301", "CK302", "{engine}3"))
def all_written(engine: EngineFacts, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every element of every parameter is written; all are poisoned before loading."""
    promised = expected_hf(config_of(subject))
    lost = lost_towers(raw_config_of(subject), subject.specs) if subject.kind == "hf" else ()
    why = partial(why_unwritten, engine, promised=promised, lost=lost)
    for report, draft in _reports(engine, subject):
        result.compared(report.parameters)
        yield from _findings(engine, report.unwritten, "every element written by load_weights", why, draft)


@each_engine(3, explained_by=("CK104", "CK301", "CK302"))
def none_dropped(engine: EngineFacts, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every element of every tensor is written into a parameter."""
    config = config_of(subject)
    packed = subject.kind == "hf" and bool(weights_of(config))
    expected = "written into its own parameter"
    of_cache = f"serve with a cache in the model's dtype: {engine.label}'s class loads no cache scales and uses 1 for "
    of_cache += "a cache in FP8 (--kv-cache-dtype)"
    for report, draft in _reports(engine, subject):
        result.compared(report.loaded_names)
        why = partial(why_dropped, engine, report=report, config=config, packed=packed)
        scales = [seen for seen in report.dropped if is_cache_scale(seen.tensor, config)]
        yield from _findings(engine, [seen for seen in report.dropped if seen not in scales], expected, why, draft)
        yield from _findings(engine, scales, expected, lambda seen: of_cache, draft, "warning")


@each_engine(4)
def values_in_engine(engine: EngineFacts, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every tensor against each place that the engine wrote it to, before any repacking."""
    expected = "a dtype that holds the value exactly"
    harmless = "convert with --dtype if the loss matters; the files are right"
    for report, draft in _reports(engine, subject):
        result.compared(report.tensors, nbytes=report.bytes)
        yield from _findings(engine, report.differing, "the bits of the checkpoint", lambda seen: "", draft)
        yield from _findings(engine, report.rounded, expected, lambda seen: harmless, draft, "warning")
    for report, draft in _reports(engine, subject):
        if report.computed and not report.differing:
            computed = f"{len(report.computed)} parameters that {draft or engine.label} computes from several tensors"
            raise CannotCheck(f"{computed} were not compared, for example {report.computed[0]}")


def _may_have_experts(subject: Subject) -> bool:
    config = config_or_none(subject)
    return config is None or dims_of(config).experts > 0


@each_engine(
    5,
    applies_to=only_if(_may_have_experts, "the model has no routed experts"),
    explained_by=("CK202", "CK204", "CK205", "CK301", "CK302", "{engine}2", "{engine}3"),
)
def routers_alive(engine: EngineFacts, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """After loading, the router of every layer with experts is written, finite, and not constant."""
    hint = "compare the router with the source (--source), and restore it from there"
    if weights_of(config_of(subject)):
        ignore = f"add `{keep_router(config_of(subject))}` to quantization_config.ignore"
        hint = f"if CK301 reports that the router is packed, {ignore} and quantize again; else {hint}"
    for report, draft in _reports(engine, subject):
        result.compared(report.routers_seen)
        yield from _findings(engine, report.routers, "a router that distinguishes experts", lambda seen: hint, draft)


@each_engine(6, applies_to=_may_repack)
def repacked(engine: EngineFacts, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Quantized parameters have Marlin's layout, computed here, and all other parameters are unchanged."""
    for report, draft in _reports(engine, subject):
        if report.repacked is None:
            _require_packed(subject)  # more ranks than GPUs, so they ran on the CPU
            without = f"run on a GPU, or accept this with --accept {engine.codes}6"
            raise CannotCheck(f"{engine.label}'s kernels that repack weights need CUDA: {without}")
        result.compared(report.repacked_seen)
        why = partial(why_not_repacked, engine, report.version)
        yield from _findings(engine, report.repacked, "the loaded values in the kernel's order", why, draft)
    for report, draft in _reports(engine, subject):
        if report.unchecked and not report.repacked:
            example = report.unchecked[0] + (f" in {draft}" if draft else "")
            raise CannotCheck(f"ckptkit does not know how {len(report.unchecked)} are repacked, such as {example}")


@each_engine(7, applies_to=only_if(is_parallel, "no parallel sizes were given"))
def parallel_sizes(engine: EngineFacts, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every rank of the engine ran its loader; the other checks compare all of them."""
    if engine_sizes(engine, subject) is None:
        sizes = {"--tp": subject.tp, "--pp": subject.options.pp, "--ep": subject.ep, "--etp": subject.options.etp or 1}
        given = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        why = f"it does not support {given}: {engine.sizes}, and tp / ep ranks split an expert"
        hint = "pass these sizes with --against-megatron only"
        raise CannotCheck(f"{engine.label} was loaded on one rank, since {why}; {hint}")
    result.compared(_report(engine, subject).sizes.ranks)
    yield from ()


def _has_draft_layers(subject: Subject) -> bool:
    config = config_or_none(subject)
    return config is not None and bool(draft_prefixes(config))


@each_engine(8, applies_to=only_if(_has_draft_layers, "the model has no multi-token prediction layers"))
def loads_draft(engine: EngineFacts, subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The engine's draft class loads the multi-token prediction layers, which the other checks then compare too."""
    report, failure = _report(engine, subject), run_engine_load(subject, engine).failure
    draft = report.draft_model
    if failure is not None and failure.verdict:
        hint = "serve without speculative decoding, so that these layers are not loaded"
        if weights_of(config_of(subject)):
            hint = f"check `ignore` for {engine.label}'s draft class with `ckptkit lint`, or {hint}"
        expected = f"{engine.label} builds its draft class and loads the multi-token prediction layers"
        yield Issue(expected, str(failure), hint, names=report.draft, as_one=True)
        return
    if draft is None:
        nothing = f"{engine.label} got no tensor of the multi-token prediction layers"
        raise CannotCheck(f"the draft model was not checked: {failure}" if failure else nothing)
    result.compared(draft.loaded_names)
    result.facts[f"{engine.label}'s draft model"] = [
        f"{draft.model} loaded {draft.loaded_names} tensors into {draft.parameters} parameters, and shares embeddings "
        f"and output layer with {report.model}",
        *(f"{engine.label} logged: {line}" for line in draft.log[:5]),
    ]
    yield from ()


def keep_router(config: Mapping[str, Any]) -> str:
    """The entry of `ignore` for this model's routers, under the names of its releases."""
    return entry_for(routers(config)[0].removesuffix(".weight"))


def why_refused(engine: EngineFacts, message: str, lacking: Mapping[str, Any]) -> str:
    """The hint if an engine did not load the model; `lacking` are keys missing in config.json (CK731)."""
    if (match := _NO_KEY.search(message)) is None:
        return f"compare config.json with the release, or run `{engine.server}` on the directory for the complete log"
    release = "take config.json from the release: transformers 5 writes only keys of its own class"
    for key, value in lacking.items():
        if key.rpartition(".")[2] == match[1]:
            return f"add {format_keys({key: value})} to config.json, or {release}"
    return f"{release}; {engine.label} needs {match[1]}, which config.json does not have"


def why_unwritten(engine: EngineFacts, seen: Observation, promised: Collection[str], lost: Collection[str] = ()) -> str:
    """The hint for a parameter that was not written; `lost` are missing tensors of a vision tower."""
    if lost and seen.tensor not in promised:
        return "copy the missing tensors of the vision tower (CK730) from the release"
    if seen.tensor == seen.param and seen.tensor not in promised:
        other = f"{engine.label}'s class has a parameter without a tensor in this model"
        return f"compare config.json with the release: {other} ({engine.codes}3 lists dropped tensors)"
    return f"restore the tensor, or its name: {engine.codes}3 lists the tensors that {engine.label} drops"


def why_dropped(
    engine: EngineFacts, seen: Observation, report: LoadReport, config: Mapping[str, Any], packed: bool
) -> str:
    """The hint for a tensor that was dropped; `packed`: in a quantized checkpoint."""
    if seen.original is not None:
        shared = f"{engine.label}'s draft model uses embeddings and output layer of the model"
        return f"make the copies equal, or remove them: {shared}"
    if seen.tensor.endswith(f".{WEIGHT_SCALE_INV}"):
        return why_no_scale(engine, seen.tensor, report)
    name = f"{engine.label}'s {report.model}"
    hint = _why_no_dense_layer(seen, name, config)
    return hint or (_why_unpacked(engine, seen.tensor, config) if packed else None) or _why_unknown(seen, name)


def _why_unpacked(engine: EngineFacts, name: str, config: Mapping[str, Any]) -> str | None:
    """The hint if only the engine or only the checkpoint has the module quantized."""
    module = name.rpartition(".")[0]
    if name.endswith(INT4_ENDINGS) and f"{module}.weight" in (*routers(config), *routers(config, draft=True)):
        fix = f"add `{keep_router(config)}` to quantization_config.ignore and store the router unquantized"
        return f"{fix}: {engine.label} builds it unquantized and silently ignores packed tensors"
    if name.endswith(INT4_ENDINGS):
        return f"store {module} unquantized, as {engine.label} builds it, and add it to quantization_config.ignore"
    if name.endswith("_proj.weight"):
        fix = "or add a regex to `ignore` that also matches the fused name (qkv_proj, gate_up_proj)"
        return f"pack {module}, as {engine.label} builds it, {fix}"
    return None


def why_no_scale(engine: EngineFacts, name: str, report: LoadReport) -> str:
    """The hint for scales of FP8 blocks, if the engine's class loads none, or none of this module."""
    if not any(one.endswith(f".{WEIGHT_SCALE_INV}") for one in report.equal):
        fix = "dequantize the model, or quantize the BF16 release with `ckptkit quantize --scheme fp8-channel`"
        return f"{fix}: {engine.label}'s {report.model} has no parameter for scales of FP8 blocks"
    module = name.rpartition(".")[0]
    return f"store {module} in BF16, as {engine.label} builds it, and add it to modules_to_not_convert in config.json"


def _why_no_dense_layer(seen: Observation, model: str, config: Mapping[str, Any]) -> str | None:
    """The hint for a dense MLP if the engine's class builds experts there."""
    config, layer = language_part(config), LAYER.match(seen.tensor)
    if not layer or ".mlp." not in seen.tensor or seen.is_partial:
        return None
    number = int(layer[1])
    if number in (config.get("mlp_only_layers") or ()):
        key = "mlp_only_layers"
    elif (number + 1) % (config.get("decoder_sparse_step") or 1):
        key = "decoder_sparse_step"
    else:
        return None
    builds = f"ignores {key} of config.json and builds experts in layer {number}"
    return f"serve this model with another engine: {model} {builds}, so it has no parameter {seen.param}"


def _why_unknown(seen: Observation, model: str) -> str:
    if seen.tensor.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return "save with save_original_format=True, or convert to Megatron and back: engines read a tensor per expert"
    if seen.is_partial:
        fix = "compare the sizes in config.json with the release; a class may ignore some (for example head_dim)"
        return f"{fix}: {model} builds {seen.param} smaller than the tensor and drops the rest"
    compare = "compare architectures in config.json and the name of the tensor with the release"
    return f"{compare}: {model} has no parameter {seen.param}"


def why_not_repacked(engine: EngineFacts, release: str, seen: Observation) -> str:
    """The hint for a parameter that was repacked wrongly."""
    param = seen.param.partition("[")[0]
    for known in quirks(engine.name, "misorders", release):
        if known.is_about(param, {}):
            return known.message
    if param.endswith((WEIGHT_PACKED, WEIGHT_SCALE)):
        return "try another group size or unquantized weights: the sizes may be outside the kernel's limits"
    return f"report this with the version of {engine.label}: the kernel's limits are not the cause"
