"""CK301 to CK304: packed INT4 weights, and scales of a quantized cache; `floats` checks weights in floats."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from ckptkit.converters.hf_names import layer_of
from ckptkit.converters.planner import dims_of, expected_hf, rules_of
from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import shortened
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import declared_quantization, describe_quantization, quantization_of
from ckptkit.quant.formats.dequantize import format_of
from ckptkit.quant.formats.groups import Group, groups_of, is_cache_calibrated, targets_of
from ckptkit.quant.formats.packing import is_expert
from ckptkit.quant.formats.part_names import PACKED, SCALE, SHAPE, packed_in
from ckptkit.quant.formats.scheme import get_list
from ckptkit.quant.ignore.agree import NOTHING_PACKED
from ckptkit.quant.ignore.names import entry_for, matrices_of
from ckptkit.quant.ignore.readers import BY_CLASS, deciding_readers, severity_of_all, worst
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tiles import UNPACKED, fused_in_transformers
from ckptkit.quant.ignore.tree import class_tree
from ckptkit.verify.checks.headers.renamed import renamed_of
from ckptkit.verify.checks.quantization import floats
from ckptkit.verify.checks.quantization.quantization_config import config_issue, refused_parts, second_config
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, NotApplicable, Subject, check, once, warning_if
from ckptkit.verify.evidence.agreement import agreement
from ckptkit.verify.evidence.expected import config_of, config_or_none, is_quantized, packed_parts, weights_in
from ckptkit.verify.evidence.floats.stored import stored_floats_of
from ckptkit.verify.evidence.folding import group_by_pattern
from ckptkit.verify.evidence.packed import (
    Int4Format,
    int4_format,
    int4_format_in,
    int4_format_of,
    part_shapes,
    read_scales,
)
from ckptkit.verify.evidence.rounding import keeps_scales, names_grid

_NEVER = {"output_layer.weight": "the output layer", "shared_experts.gate_weight": "the shared expert's gate"}
_NEVER_OF_KIND = {"Embedding": "the token embedding", "Router": "the router"}
# The scales of a cache, as named in compressed-tensors, ModelOpt and AutoFP8.
_SCALE = re.compile(r"(.+\.self_attn)\.(?:([kv])_proj\.(?:[kv]|output)|([kv])|(kv))_scale")
_ATTENTION = re.compile(r"(.+\.self_attn)\.(?:k_proj|qkv_proj|kv_b_proj)\..+")
_HINT = "calibrate again, or remove both the scales and kv_cache_scheme"
_SILENT = "transformers computes with uninitialized memory"


def require_quantized(subject: Subject) -> None:
    """Raises NotApplicable for a checkpoint without quantized weights."""
    if subject.kind == "megatron":
        raise NotApplicable("Megatron holds no INT4 weights")
    config = config_or_none(subject)
    if config is not None and not is_quantized(config):
        raise NotApplicable(describe_quantization(config))


def _declares_quantization(subject: Subject) -> None:
    """As `require_quantized`, but accepts a checkpoint with only a quantized cache of keys and values."""
    config = None if subject.kind == "megatron" else config_or_none(subject)
    if config is None or declared_quantization(config) is None:
        require_quantized(subject)


def packed_weights(
    subject: Subject, *, may_be_empty: bool = False
) -> tuple[Mapping[str, Any], Mapping[str, TensorSpec], Int4Format]:
    """Config, specs and format. Raises NotApplicable if no group packs integers, CannotCheck if nothing is packed."""
    config = config_of(subject)
    if (form := int4_format_of(config)) is None:
        raise NotApplicable("quantization_config describes no packed integer weights, the only ones that it checks")
    specs = subject.checkpoint.specs
    if not may_be_empty and not any(packed_in(specs)):
        raise CannotCheck("nothing is packed", "CK302")
    return config, specs, form


def packs_integers(subject: Subject) -> bool:
    """Whether the checkpoint has INT4 in addition to weights in floats."""
    return int4_format_of(subject.hf_files.config) is not None and any(packed_in(subject.hf_files.specs))


@once
def never_packed(subject: Subject) -> dict[str, str]:
    """Modules that no reader expects packed, with descriptions: routers, embedding, head, norms."""
    found, config = {}, config_of(subject)
    never = _NEVER | {dims_of(config).head: "the output layer"}
    for rule in rules_of(config):
        what = next((what for suffix, what in never.items() if rule.megatron.endswith(suffix)), None)
        for name in rule.hf:
            module = name.removesuffix(".weight")
            if what := what or _NEVER_OF_KIND.get(rule.mapping.kind):
                found[module] = what
            elif "norm" in module.rpartition(".")[2]:
                found[module] = "a norm"
    return found


@check("CK301", preflight=True, applies_to=require_quantized)
def nothing_forbidden(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The packed modules against those of other classes; only by its name, a router looks like a Linear."""
    if floats.stores_floats(subject):
        yield from floats.forbidden_floats(subject, never_packed(subject), result)
        if not packs_integers(subject):
            return
    config, specs, _ = packed_weights(subject, may_be_empty=True)
    forbidden = never_packed(subject)
    result.compared(len(forbidden))
    wrong = [module for module in forbidden if module + PACKED in specs and not _targeted(module, config)]
    for names in group_by_pattern(wrong):
        hint = f"quantize again with '{entry_for(names[0])}' in ignore, an entry that all readers understand"
        packed = [name + PACKED for name in names]
        yield Issue(f"{forbidden[names[0]]} unquantized", "packed as INT4", hint, names=packed)


def _targeted(module: str, config: Mapping[str, Any]) -> bool:
    """Whether a config group names the output layer, the only way to pack it."""
    groups = (group for group in quantization_of(config)["config_groups"].values() if isinstance(group, dict))
    return module == "lm_head" and any(module in (group.get("targets") or []) for group in groups)


@check("CK302", preflight=True, applies_to=require_quantized)
def expected_packed(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The packed modules on disk against those that each reader of `ignore` expects, without those of CK301.

    Modules that readers that count load or send wrongly are an error (`ckptkit.quant.ignore.readers.severity_of`), also
    packed experts that transformers, as a reader, cannot load. Those that only other readers misread are a warning.
    """
    if renamed_of(subject) is not None:
        raise CannotCheck("not run because the tensors have other names than the model of config.json", "CK104")
    config, specs = config_of(subject), subject.checkpoint.specs
    announced = stored_floats_of(subject)[0] is not None and not any(packed_in(specs))
    if announced or (floats.stores_floats(subject) and not packs_integers(subject)):
        yield from floats.float_lists(subject, result)
        return
    packed = set(packed_in(specs))
    result.compared(len(packed))
    if (issue := config_issue(config, subject.readers, subject.engine)) is not None:
        if packed:
            yield issue
            return
        try:
            format_of(config)
        except CkptkitError as error:
            raise CannotCheck(f"this quantization_config could not be checked: {error.message}") from error
        # Releases in FP8 and MXFP4 pack nothing.
        raise NotApplicable(f"no weight is packed, and this check is about packed weights: {issue.actual}")
    yield from refused_parts(config, subject.readers, subject.engine)
    try:
        found = agreement(specs, config, subject.readers, subject.engine, subject.updated)
    except CkptkitError as error:
        raise CannotCheck(f"this quantization_config could not be checked: {error.message}") from error
    result.compared(found.looked_at - len(packed))
    yield from found.issues
    if not packed and not found.missing:
        actual = "no weight is packed, and no reader expects packed weights"
        yield Issue("INT4 weights, as config.json declares", actual, NOTHING_PACKED, file="config.json")
    by_ck301 = {module for module in never_packed(subject) if not _targeted(module, config)}
    for module in sorted(found.forbidden.keys() - by_ck301):
        yield Issue(f"unquantized, since {found.forbidden[module]}", "packed as INT4", names=[module + PACKED])
    experts = sorted(name + PACKED for name in packed if is_expert(name + PACKED))
    if experts and "transformers" in (subject.readers or ()):  # which may build them as one parameter
        try:
            reason = fused_in_transformers(config)
        except CkptkitError as error:
            raise CannotCheck(f"ckptkit cannot tell how transformers loads these experts: {error.message}") from error
        if reason is not None:
            hint = f"serve the model with SGLang or vLLM, or quantize again and {UNPACKED}"
            yield Issue("experts that transformers loads", reason, hint, names=experts)
    by_name = [target.pattern for target in targets_of(groups_of(config))] != ["Linear"]
    hint = "add the module to `targets` of its config group" if by_name else "remove the module from ignore"
    unwanted = [name + PACKED for name in found.unwanted]
    yield Issue("unquantized, as config.json declares", "packed as INT4", f"{hint}, or quantize again", names=unwanted)
    hint = "add the module to ignore, or quantize again; if no weight is packed, remove quantization_config"
    missing = [f"{name}.weight" for name in found.missing]
    yield Issue("packed as INT4, as config.json declares", "unquantized", hint, names=missing)


@check("CK303", preflight=True, applies_to=_declares_quantization)
def parts_fit(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Shape and dtype of every part: words int32 [rows, columns x bits / 32], scale [rows, groups], shape int64 [2]."""
    yield from second_config(subject.path, subject.readers)
    yield from cache_scales(subject, result)
    try:
        require_quantized(subject)
    except NotApplicable:  # only the cache of keys and values is quantized
        return
    if floats.stores_floats(subject):
        yield from floats.float_parts(subject, result)
        if not packs_integers(subject):
            return
    config, specs, _ = packed_weights(subject)
    shapes, groups = expected_hf(config), groups_of(config)
    by_targets = _by_targets(subject, config, groups)
    for module in packed_in(specs):
        shape = shapes.get(f"{module}.weight")
        if shape is None or len(shape) != 2:
            continue
        for weights, why in by_targets.get(module, {0: (weights_in(config, groups, module), "")}).values():
            form, parts = int4_format(weights) or int4_format_in(config, groups, module), packed_parts(weights)
            group = "one scale per row" if form.group is None else f"group_size {form.group}"
            hint = f"quantize again, or correct config.json, which has {form.bits} bits and {group}{why}"
            for part, (expected, dtypes) in part_shapes(form, shape, module).items():
                if (spec := specs.get(f"{module}.{part}")) is None or part not in parts:
                    continue
                result.compared()
                if spec.shape != expected or spec.dtype not in dtypes:
                    actual = f"{list(spec.shape)} {spec.dtype}"
                    yield Issue(f"{list(expected)} {' or '.join(dtypes)}", actual, hint, names=[spec.name])


def _by_targets(
    subject: Subject, config: Mapping[str, Any], groups: Sequence[Group]
) -> Mapping[str, Mapping[int, tuple[Mapping[str, Any], str]]]:
    """By module, its `weights` for the readers that count, and the target; compressed-tensors sorts targets first."""
    found: dict[str, dict[int, tuple[Mapping[str, Any], str]]] = defaultdict(dict)
    with suppress(CkptkitError):  # CK302 reports an unknown model
        tree = class_tree(config) if len(groups) > 1 else None
        matrices = matrices_of(subject.hf_files.specs, tree, config) if tree else []
        first = BY_CLASS[:1] if subject.readers is None else ()
        readers = (*first, *deciding_readers(subject.readers, subject.engine))
        readings = read_all(readers, matrices, get_list(quantization_of(config), "ignore"), config, targets_of(groups))
        for reader in readers:
            for matrix, target in zip(matrices, readings[reader].targets, strict=False):
                if target is not None and target.kind == "packs":
                    why = f" in the config group with target {target.pattern!r}, which {reader} uses"
                    found[matrix.module].setdefault(target.group, (groups[target.group].weights, why))
    return found


@check("CK304", explained_by=("CK204",), applies_to=require_quantized)
def scales_sane(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every scale and weight_shape. Readers use the sign of a scale, so a negative one may be right."""
    if floats.stores_floats(subject):
        yield from floats.float_scales(subject, result)
        if not packs_integers(subject):
            return
    config, _, form = packed_weights(subject)
    shapes, scales = expected_hf(config), read_scales(subject)
    # Negative scales belong to a symmetric grid that is not ckptkit's, and have the sign of the group's largest weight.
    # About half are negative; less than one in a hundred are faults. Scales from another checkpoint may be any part.
    signed = form.symmetric and not names_grid(config)
    if signed and not keeps_scales(config):
        signed = 100 * sum(one.negative for one in scales) >= sum(one.values for one in scales)
    for scale in scales:
        result.compared(nbytes=scale.nbytes)
        shape, names = shapes.get(f"{scale.module}.weight"), [scale.module + SCALE]
        if shape is not None and scale.shape is not None and scale.shape != shape:
            yield Issue(f"shape {list(shape)}", f"shape {list(scale.shape)}", names=[scale.module + SHAPE])
        if scale.not_finite:
            yield Issue("finite scales", "NaN or infinity", names=names)
        elif scale.zero:
            yield Issue("scales other than zero", f"{scale.zero} of {scale.values} are zero", names=names)
        elif scale.negative and not signed:
            yield Issue("scales above zero", f"{scale.negative} of {scale.values} are negative", names=names)
    if signed and (negative := sum(scale.negative for scale in scales)):
        values = sum(scale.values for scale in scales)
        result.note(f"CK304: {negative} of {values} scales are negative, as AutoRound's are; readers keep their sign")


def cache_scales(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every layer has both scales of its cache, or no layer has any; compressed-tensors' static scheme requires them.

    vLLM 0.26 uses a single k_scale for both, does not start with a single v_scale, and uses 1.0 in a layer without any
    (`kv_cache.py`). transformers 5.12 then computes with uninitialized memory.
    """
    scales: dict[str, set[str]] = defaultdict(set)
    attention: set[str] = set()
    for name in subject.hf_files.specs:
        if match := _SCALE.fullmatch(name):
            result.compared()
            scales[match[1]].update(match[2] or match[3] or "kv")
        elif match := _ATTENTION.fullmatch(name):
            attention.add(match[1])
    config = config_or_none(subject)
    content = declared_quantization(config or {})
    calibrated = config is not None and is_cache_calibrated(content)
    severity = severity_of_all(BY_CLASS, subject.readers) if calibrated else "warning"  # only transformers misreads it
    for lost, stored in ("kv", "vk"):
        names = [f"{module}.{stored}_scale" for module, kinds in scales.items() if lost not in kinds]
        expected, actual = "a k_scale and a v_scale", f"{lost}_scale is not stored"
        yield Issue(expected, actual, _HINT, names=names, severity=worst((severity, warning_if(lost == "v"))))
    if config is None or not (scales or calibrated):
        return
    layers = dims_of(config).layers
    attention = {name for name in attention if (layer_of(name) or 0) < layers and f"{name}.A_log" not in subject.specs}
    for group in group_by_pattern(sorted(attention)):
        lacking = [name for name in group if name not in scales]
        if calibrated or (len(lacking) < len(group) and not scales.keys().isdisjoint(group)):
            effect = f"{_SILENT}, and engines use 1.0" if calibrated else "engines use 1.0"
            actual = f"{len(lacking)} of {len(group)} layers have none: {effect}"
            expected = "cache scales in each layer" + calibrated * ", as the static kv_cache_scheme requires"
            yield Issue(expected, actual, _HINT, names=lacking, severity=severity)
    if calibrated:
        modules = [module for module in sorted(attention) if scales.get(module, set()) >= {"k", "v"}]
        yield from _against_scheme(subject, content["kv_cache_scheme"], config, modules, result)


def _against_scheme(
    subject: Subject, scheme: Mapping[str, Any], config: Mapping[str, Any], attention: list[str], result: CheckResult
) -> Iterator[Issue]:
    """Compares layers that have scales with the tensors that compressed-tensors builds for this scheme."""
    severity = severity_of_all(BY_CLASS, subject.readers)
    try:
        parts = _expected_parts(scheme, config)
    except CkptkitError as error:
        expected = "a kv_cache_scheme that compressed-tensors accepts"
        yield Issue(expected, error.message, _HINT, file="config.json", severity=severity)
        return
    declared = f"as kv_cache_scheme requires (strategy {shortened(scheme.get('strategy', 'tensor'))})"
    renamed = "stored with another name", warning_if("transformers" not in (subject.readers or ()))
    for module, (part, shape) in product(attention, parts.items()):
        result.compared()
        spec = subject.hf_files.specs.get(name := f"{module}.{part}")
        if spec is None:
            actual, its_severity = renamed if part.endswith("scale") else ("not stored", severity)
            yield Issue(f"{part}, {declared}", f"{actual}: {_SILENT}", _HINT, names=[name], severity=its_severity)
        elif spec.shape != shape and not math.prod(shape) == math.prod(spec.shape) == 1:  # readers take [] for [1]
            expected, actual = f"shape {list(shape)}, {declared}", f"shape {list(spec.shape)}"
            yield Issue(expected, actual, _HINT, names=[name], severity=severity)


def _expected_parts(scheme: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a layer's cache. Raises CkptkitError if compressed-tensors refuses it."""
    # Imported here because they import transformers, which takes seconds.
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams

    dims = dims_of(config)
    module = torch.nn.Linear(1, 1, bias=False, device="meta")
    try:
        arguments, shape = QuantizationArgs.model_validate(dict(scheme)), (dims.groups, None, dims.head_dim)
        for kind in "kv":
            initialize_qparams(module, kind, arguments, shape, torch.bfloat16, force_zero_point=False)
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as error:
        strategy = shortened(scheme.get("strategy"))
        refused = f"strategy {strategy} stores no scales" if isinstance(error, TypeError) else ""
        raise CkptkitError(f"kv_cache_scheme: {refused or words_of(error)}") from error
    return {name: tuple(one.shape) for name, one in module.named_parameters() if name != "weight"}
