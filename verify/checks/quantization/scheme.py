"""CK305 to CK309: quantized weights against their source and each other: fused layers, parallel cuts, scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from ckptkit.converters.hf_names import FUSED, GATE_UP, LATENT_DOWN, QKV
from ckptkit.converters.planner import expected_hf
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import describe_quantization
from ckptkit.quant.formats.groups import groups_of
from ckptkit.quant.formats.packing import is_expert
from ckptkit.quant.formats.part_names import PACKED, SCALE, ZERO_POINT, packed_in
from ckptkit.quant.ignore import tiles
from ckptkit.quant.ignore.tree import ClassTree, class_tree
from ckptkit.verify.checks.headers.files import names_of
from ckptkit.verify.checks.quantization.floats import float_pairs, stores_floats
from ckptkit.verify.checks.quantization.int4 import packed_weights, packs_integers, require_quantized
from ckptkit.verify.checks.values.source import values_kept
from ckptkit.verify.core.check import CannotCheck, CheckResult, Issue, NotApplicable, Subject, check
from ckptkit.verify.evidence.expected import config_or_none, is_quantized, require_config
from ckptkit.verify.evidence.floats.rounding import float_rounding_of, float_weights
from ckptkit.verify.evidence.floats.stored import float_scales_of, stored_floats_of
from ckptkit.verify.evidence.folding import by_key, group_by_pattern
from ckptkit.verify.evidence.packed import Int4Format, int4_format_in, int4_format_of, read_scales
from ckptkit.verify.evidence.rounding import grid_of, is_gptq, rounding_of
from ckptkit.verify.quirks import quirk

# Layers that engines fuse. Source: SGLang's and vLLM's `packed_modules_mapping` and their DeepSeek loaders.
_FUSED = (LATENT_DOWN, QKV, GATE_UP, ("w1", "w3"))
_FUSED_OF: Mapping[str, str] = {part: ", ".join(parts) for parts in _FUSED for part in parts}
# A scale follows the largest weight of its group: layers of a kind differ by a small factor, wrong units by hundreds.
_MAX_FACTOR = 32.0
_HINT = "quantize again from this source"


def _quantized_and_kept(subject: Subject) -> None:
    values_kept(subject)
    require_quantized(subject)


@check("CK305", needs=("source",), explained_by=("CK202", "CK204", "CK205", "CK304"), applies_to=_quantized_and_kept)
def near_source(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every quantized weight against the source, within the bounds of `evidence/rounding.py`, `floats/rounding.py`."""
    plain = subject.source is not None and not is_quantized(subject.source.config)
    packed = subject.kind == "megatron" or int4_format_of(subject.checkpoint.config) is not None
    yield from _floats_near_source(subject, result) if plain and not packed else _int4_near_source(subject, result)


def _floats_near_source(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    stored, specs = float_weights(subject), subject.checkpoint.specs
    if stored.unread is not None:
        raise CannotCheck(f"this quantization_config could not be checked: {stored.unread}")
    if not stored.judged and not stored.broken:
        raise NotApplicable("no weight of the source is stored in FP8 or FP4")
    rounding = float_rounding_of(subject)
    result.compared(len(rounding), nbytes=sum(specs[name].nbytes for name in stored.parts))
    for name, reason in stored.broken.items():
        yield Issue("codes and scales of matching shapes", reason, _HINT, names=[name])
    wrong = {name: one for name, one in rounding.items() if one.wrong}
    for names in group_by_pattern(wrong):
        worst = max(names, key=lambda name: wrong[name].times)
        one = wrong[worst]
        where = f"{worst} ({one.rows})" if one.rows else worst
        actual = f"{one.wrong} of {one.numel} elements of {where} are off by up to {one.times:.3g} half steps"
        yield Issue(f"values within half a step of the source, in {stored.words}", actual, _HINT, names=names)
    # FP8 of an MXFP4 source, exact except for numbers outside its range.
    changed = {name: one for name, one in rounding.items() if one.changed and not one.wrong}
    for names in group_by_pattern(changed):
        several = [changed[name] for name in names]
        count, zeros = sum(one.changed for one in several), sum(one.zeroed for one in several)
        expected = "the exact numbers of the MXFP4 source"
        actual = f"{count} of {sum(one.numel for one in several)} elements are rounded, {zeros} of them to 0; "
        actual += f"for example, {names[0]}{several[0].first}"
        hint = "dequantize to BF16 or quantize to mxfp8, which are exact: some blocks are too wide for FP8"
        yield Issue(expected, actual, hint, names=names, severity="warning")


def _int4_near_source(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    config, _, _ = packed_weights(subject)
    if subject.source is None or is_quantized(subject.source.config):
        raise NotApplicable("the source is quantized too, so CK202 compares both bit for bit")
    rounding, grid = rounding_of(subject), grid_of(config)
    if is_gptq(config):
        result.note("CK305: GPTQ rounded these weights, so errors below half the norm of a row are not found")
    for one in rounding.values():
        result.compared(nbytes=one.nbytes)
    wrong = {name: one for name, one in rounding.items() if one.failed}
    coarse = {name: one.scale_off for name, one in rounding.items() if one.scale_off and not one.failed}
    for names in group_by_pattern(wrong):
        worst = max(names, key=lambda name: (wrong[name].distance or 0.0, wrong[name].steps))
        expected, actual = wrong[worst].words
        yield Issue(expected, f"{actual} in {worst}", _HINT, names=names)
    for names in group_by_pattern(coarse):
        actual = f"scales are off by up to {max(coarse[name] for name in names):.0%}"
        scales = [name.removesuffix(".weight") + SCALE for name in names]
        hint = "quantize again, or correct observer_kwargs"
        yield Issue(f"scales of the {grid} grid, as config.json declares", actual, hint, names=scales)


@check("CK306", applies_to=require_quantized)
def fused_alike(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Packing, bits, group size, scale dtype and zero points are equal in fused layers and in each layer's experts."""
    specs = subject.hf_files.specs
    if subject.readers and {"sglang", "vllm"}.isdisjoint(subject.readers):
        raise NotApplicable(f"the programs of --reader {' '.join(subject.readers)} fuse no layers")
    if stores_floats(subject):
        yield from float_pairs(subject, _FUSED_OF, result)
        if not packs_integers(subject):
            return
    if not any(packed_in(specs)):
        raise CannotCheck("no weight is packed", "CK302")
    parameters: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    result.compared(sum(module.rpartition(".")[2] in FUSED for module in packed_in(specs)))  # stored as one tensor
    for module, scheme in _stored_schemes(subject):
        for key, part in _parameters(module, scheme):
            result.compared()
            parameters[key][part].append(module)
    for schemes in parameters.values():
        usual, *rare = sorted(schemes, key=lambda scheme: len(schemes[scheme]), reverse=True)
        for scheme in rare:
            expected = f"{usual}, like the other projections of the fused layer"
            yield Issue(expected, scheme, names=[name + ".weight" for name in schemes[scheme]])


def _stored_schemes(subject: Subject) -> Iterator[tuple[str, str]]:
    """Every module with a weight, and its scheme. Raises CannotCheck if config.json does not define the bits."""
    config, specs = config_or_none(subject), subject.hf_files.specs
    if config is None or int4_format_of(config) is None:
        raise CannotCheck("config.json does not define the bits of packed weights", "CK101", "CK302")
    groups, (_, floats) = groups_of(config), stored_floats_of(subject)
    in_floats = {one.name: one.layout.words for one in floats}
    for name in specs:
        if name.endswith(".weight"):
            yield name.removesuffix(".weight"), in_floats.get(name, "unquantized")
        elif name.endswith(PACKED) and (scale := specs.get((module := name.removesuffix(PACKED)) + SCALE)) is not None:
            zeros = ", zero points" * (module + ZERO_POINT in specs)
            form = _fit_group(int4_format_in(config, groups, module), specs[name].shape, scale.shape)
            yield module, f"{form.title}, scales in {scale.dtype}{zeros}"


def _fit_group(form: Int4Format, words: tuple[int, ...], scales: tuple[int, ...]) -> Int4Format:
    """The format with the group size that fits the shapes of words and scales."""
    if form.bits < 1 or len(words) != 2 or len(scales) != 2 or not scales[1]:
        return form  # CK302 and CK303 judge these
    columns = words[1] * 32 // form.bits
    if scales[1] == form.groups(columns):
        return form
    return replace(form, group=None if scales[1] == 1 else -(-columns // scales[1]))


def _parameters(module: str, scheme: str) -> Iterator[tuple[tuple[str, str], str]]:
    """The fused layers with a module. All experts are packed or none, and those of one projection alike."""
    parent, _, projection = module.rpartition(".")
    layer, _, expert = parent.rpartition(".experts.")
    if layer and expert.isdecimal():
        packed = scheme.startswith("INT")
        yield (layer, "experts"), "packed integers" if packed else scheme
        if packed:
            yield (layer, _FUSED_OF.get(projection, projection)), scheme
    elif projection in _FUSED_OF:
        yield (parent, _FUSED_OF[projection]), scheme


def _engine_tp(subject: Subject) -> int:
    return subject.arguments.engine_tp if subject.arguments else subject.tp


def _is_for_sglang(subject: Subject) -> None:
    require_quantized(subject)
    if subject.not_for_sglang:
        raise NotApplicable(subject.not_for_sglang)


def _has_tiles(subject: Subject) -> None:
    """SGLang cuts groups at a parallel size above 1 for any readers."""
    require_quantized(subject)
    if subject.not_for_sglang and not (_engine_tp(subject) > 1 and subject.engine == "sglang"):
        raise NotApplicable(subject.not_for_sglang)
    config = config_or_none(subject)
    if config is not None and int4_format_of(config) is None:
        raise NotApplicable(f"no weight is packed as INT4: {describe_quantization(config)}")


@check("CK309", preflight=True, applies_to=_is_for_sglang)
def zero_points_read(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The layout of routed experts' zero points by config.json, as SGLang loads them (CK303 checks files)."""
    config = config_or_none(subject)
    form = int4_format_of(config) if config else None
    names = names_of(subject)
    if not (weights := sum(name.endswith((".weight", PACKED)) for name in names)):
        raise CannotCheck("the checkpoint has no weight of a layer", "CK104")
    result.compared(weights)
    layout = quirk("sglang", "zero-points-of-experts")
    if form is not None and not form.sglang_experts and layout is not None:
        expected = "zero points of experts with shape [groups, rows / 8] in AWQ's order, as SGLang reads them"
        shifted = [name for name in names if name.endswith(ZERO_POINT) and is_expert(name)]
        hint = "quantize the experts again symmetrically or with --reader sglang; or use vLLM and pass --reader vllm"
        yield Issue(expected, layout.message, hint, names=shifted)


@check("CK307", preflight=True, applies_to=_has_tiles)
def tiles_divide(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Rows and columns of every packed weight on a rank fit SGLang's kernels (`quant/ignore/tiles.py`)."""
    config = require_config(subject)
    packed, shapes, groups = set(packed_in(subject.hf_files.specs)), expected_hf(config), groups_of(config)
    chosen = {
        module: TensorSpec(name, shape, subject.hf_files.specs[module + PACKED].dtype)
        for name, shape in shapes.items()
        if (module := name.removesuffix(".weight")) in packed
    }
    if not chosen:
        raise CannotCheck("no weight is packed", "CK302")
    result.compared(len(chosen))
    try:
        tree = class_tree(config)
    except CkptkitError as error:
        raise CannotCheck(f"this model could not be checked: {error.message}") from error
    packable = {module: spec for module, spec in chosen.items() if module in tree.packable}  # CK301 judges the rest
    dp_attention = _engine_tp(subject) > 1 and subject.arguments and subject.arguments.dp_attention
    if dp_attention and any(module not in tree.experts for module in packable):
        raise CannotCheck("--sglang-enable-dp-attention splits attention over fewer ranks, which CK307 does not know")
    by_size = by_key((int4_format_in(config, groups, module).group, spec) for module, spec in packable.items())
    for size, specs in by_size.items():
        yield from _tile_issues(subject, specs, tree, config, size)


def _tile_issues(
    subject: Subject, specs: list[TensorSpec], tree: ClassTree, config: Mapping[str, Any], size: int | None
) -> Iterator[Issue]:
    """Weights in groups of one size that do not fit."""
    tp, ep = _engine_tp(subject), (subject.arguments and subject.arguments.engine_ep) or 1
    if tp == 1:
        found = tiles.unrunnable(specs, tree, config, size)
        expected, effect = "INT4 weights with sizes that SGLang's kernels support", ", so it stops at the first prompt"
    else:
        found = tiles.unloadable(specs, tree, config, size, tp, ep)
        expected, effect = f"INT4 weights that divide over {tp} ranks", ""
    if found:
        hint, faults = found
        hint = f"{hint}; or serve with vLLM and pass --reader vllm"
        for fault, names in by_key((fault, name) for name, fault in faults.items()).items():
            yield Issue(expected, fault + effect, hint, names, as_one=True)


@check("CK308", applies_to=require_quantized)
def scales_alike(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The median scale of every packed weight is within 32 times that of its kind over all layers and experts.

    Scales of other formats, widths or block sizes are another kind. Much smaller scales are only a warning: experts
    that training never chose keep small weights.
    """
    sizes: dict[object, dict[str, float]] = defaultdict(dict)  # by format
    if stores_floats(subject):
        for one in float_scales_of(subject):
            result.compared(nbytes=one.nbytes)
            if one.median is not None:
                sizes[one.stored.layout][one.stored.scale] = one.median
    if not stores_floats(subject) or packs_integers(subject):
        config, _, _ = packed_weights(subject)
        groups = groups_of(config)
        for scale in read_scales(subject):
            result.compared(nbytes=scale.nbytes)
            if scale.median is not None:
                sizes[int4_format_in(config, groups, scale.module)][scale.module + SCALE] = scale.median
    for medians, names in ((one, names) for one in sizes.values() for names in group_by_pattern(one)):
        usual = median(medians[name] for name in names)
        expected = f"scales around {usual:.3g}, the median of this kind of weight"
        if large := [name for name in names if medians[name] > usual * _MAX_FACTOR]:
            yield Issue(expected, f"around {medians[large[0]]:.3g}, far larger", names=large)
        if small := [name for name in names if medians[name] * _MAX_FACTOR < usual]:
            yield Issue(expected, f"around {medians[small[0]]:.3g}, far smaller", names=small, severity="warning")
