"""CK305 to CK309: quantized weights compared with their source and with one another: fused layers, cuts, scales."""

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
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import config_or_none, is_quantized, require_config
from ckptkit.verify.evidence.floats.rounding import float_rounding_of, float_weights
from ckptkit.verify.evidence.floats.stored import float_scales_of, stored_floats_of
from ckptkit.verify.evidence.folding import by_key, group_by_pattern
from ckptkit.verify.evidence.packed import Int4Format, int4_format_in, int4_format_of, read_scales
from ckptkit.verify.evidence.rounding import grid_of, is_gptq, rounding_of
from ckptkit.verify.quirks import quirk

# Layers that engines hold as one. Source: SGLang's and vLLM's `packed_modules_mapping` and their DeepSeek loaders.
_FUSED = (LATENT_DOWN, QKV, GATE_UP, ("w1", "w3"))
_FUSED_OF: Mapping[str, str] = {part: ", ".join(parts) for parts in _FUSED for part in parts}
# Scales follow the largest weights of a group. Layers of one kind differ by a factor of a few, lost units by hundreds.
_MAX_FACTOR = 32.0

_HINT = "quantize again from this source"


def _quantized_and_kept(subject: Subject) -> None:
    values_kept(subject)
    require_quantized(subject)


@check("CK305", needs=("source",), explained_by=("CK202", "CK204", "CK205", "CK304"), applies_to=_quantized_and_kept)
def near_source(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Every quantized weight against the source, within bounds of `evidence/rounding.py` and `floats/rounding.py`."""
    plain = subject.source is not None and not is_quantized(subject.source.config)
    packed = subject.is_megatron or int4_format_of(subject.checkpoint.config) is not None
    yield from _floats_near_source(subject, tally) if plain and not packed else _int4_near_source(subject, tally)


def _floats_near_source(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Compares weights in floats."""
    stored, specs = float_weights(subject), subject.checkpoint.specs
    if stored.unread is not None:
        raise CannotCheck(f"no decision for this quantization_config: {stored.unread}")
    if not stored.judged and not stored.broken:
        raise NotApplicable("nothing is stored in floats of 8 or 4 bits that the source has")
    rounding = float_rounding_of(subject)
    tally.compared(len(rounding), nbytes=sum(specs[name].nbytes for name in stored.parts))
    for name, reason in stored.broken.items():
        yield Issue("codes and scales that fit", reason, _HINT, names=[name])
    wrong = {name: one for name, one in rounding.items() if one.wrong}
    for found in group_by_pattern(wrong):
        worst = max(found, key=lambda name: wrong[name].times)
        one = wrong[worst]
        where = f"{worst}, {one.rows}," if one.rows else worst
        actual = f"{one.wrong} of {one.numel} elements of {where} are further off, by up to {one.times:.3g} times that"
        yield Issue(f"within half a step of {stored.words}", actual, _HINT, names=found)
    # FP8 that repeats MXFP4 but for numbers that its scales do not reach.
    changed = {name: one for name, one in rounding.items() if one.changed and not one.wrong}
    for names in group_by_pattern(changed):
        several = [changed[name] for name in names]
        count, zeros = sum(one.changed for one in several), sum(one.zeroed for one in several)
        expected = "the numbers of the MXFP4 source, which FP8 with powers of two as scales can hold"
        actual = f"not lossless: {count} of {sum(one.numel for one in several)} elements are rounded, {zeros} of them "
        actual += f"to 0; the first of {names[0]}, {several[0].first}"
        hint = "exponents in a block spread by more than 14: dequantize to BF16 or quantize to mxfp8, which are exact"
        yield Issue(expected, actual, hint, names=names, severity="warning")


def _int4_near_source(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Compares INT4."""
    config, _, _ = packed_weights(subject)
    if subject.source is None or is_quantized(subject.source.config):
        raise NotApplicable("the source is quantized itself; CK202 compares the two bit for bit")
    rounding, grid = rounding_of(subject), grid_of(config)
    if is_gptq(config):
        tally.note(
            "CK305: GPTQ rounded these weights, so a row may be off by half its norm; smaller faults do not show"
        )
    for one in rounding.values():
        tally.compared(nbytes=one.nbytes)
    wrong = {name: one for name, one in rounding.items() if one.failed}
    coarse = {name: one.scale_off for name, one in rounding.items() if one.scale_off and not one.failed}
    for found in group_by_pattern(wrong):
        worst = max(found, key=lambda name: (wrong[name].distance or 0.0, wrong[name].steps))
        expected, actual = wrong[worst].words
        yield Issue(expected, f"{actual} in {worst}", _HINT, names=found)
    for found in group_by_pattern(coarse):
        expected = f"scales of the {grid} grid, as config.json says"
        actual = f"up to {max(coarse[name] for name in found):.0%} off"
        scales = [name.removesuffix(".weight") + SCALE for name in found]
        yield Issue(expected, actual, "quantize again, or correct observer_kwargs", names=scales)


@check("CK306", applies_to=require_quantized)
def fused_alike(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Packed or not, bits, group size, dtype of scales and zero points, over fused layers and each layer's experts.

    Raises NotApplicable where no engine is among the readers: transformers holds each layer by itself.
    """
    specs = subject.hf_files.specs
    if subject.readers and {"sglang", "vllm"}.isdisjoint(subject.readers):
        raise NotApplicable(f"--reader {' '.join(subject.readers)} holds no layers in one")
    if stores_floats(subject):
        yield from float_pairs(subject, _FUSED_OF, tally)
        if not packs_integers(subject):
            return
    if not any(packed_in(specs)):
        raise CannotCheck("nothing is packed", "CK302")
    parameters: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    tally.compared(sum(module.rpartition(".")[2] in FUSED for module in packed_in(specs)))  # in one piece as stored
    for module, scheme in _stored_schemes(subject):
        for key, part in _parameters(module, scheme):
            tally.compared()
            parameters[key][part].append(module)
    for schemes in parameters.values():
        usual, *others = sorted(schemes, key=lambda scheme: len(schemes[scheme]), reverse=True)
        for scheme in others:
            expected = f"{usual}, as the parts that engines hold in one with it"
            yield Issue(expected, scheme, names=[name + ".weight" for name in schemes[scheme]])


def _stored_schemes(subject: Subject) -> Iterator[tuple[str, str]]:
    """Every module with a weight, and its scheme: bits by config.json, the rest as stored.

    A group has the size that config.json says where there is a scale for each, else that by the number of scales.
    Packed ones without a scale are for CK104. Raises NotApplicable where config.json does not tell the bits.
    """
    config, specs = config_or_none(subject), subject.hf_files.specs
    if config is None or int4_format_of(config) is None:
        raise CannotCheck("config.json does not tell the bits of packed weights", "CK101", "CK302")
    groups, (_, floats) = groups_of(config), stored_floats_of(subject)
    in_floats = {one.name: one.layout.words for one in floats}
    for name in specs:
        if name.endswith(".weight"):
            yield name.removesuffix(".weight"), in_floats.get(name, "unquantized")
        elif name.endswith(PACKED) and (scale := specs.get((module := name.removesuffix(PACKED)) + SCALE)) is not None:
            zeros = ", zero points" * (module + ZERO_POINT in specs)
            form = _as_stored(int4_format_in(config, groups, module), specs[name].shape, scale.shape)
            yield module, f"{form.title}, scales in {scale.dtype}{zeros}"


def _as_stored(form: Int4Format, words: tuple[int, ...], scales: tuple[int, ...]) -> Int4Format:
    """The format with the group size that the shapes of words and scales tell, where they are not as it says."""
    if form.bits < 1 or len(words) != 2 or len(scales) != 2 or not scales[1]:
        return form  # for CK302 and CK303
    columns = words[1] * 32 // form.bits
    if scales[1] == form.groups(columns):
        return form
    return replace(form, group=None if scales[1] == 1 else -(-columns // scales[1]))


def _parameters(module: str, scheme: str) -> Iterator[tuple[tuple[str, str], str]]:
    """The fused layers that a module is part of. All experts are packed or none, and those of one projection alike."""
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
    """The tensor parallel size of the engine: of a launch its own option, otherwise --tp."""
    return subject.arguments.engine_tp if subject.arguments else subject.tp


def _packed_for_sglang(subject: Subject) -> None:
    require_quantized(subject)
    if subject.not_for_sglang:
        raise NotApplicable(subject.not_for_sglang)


def _cut_for_sglang(subject: Subject) -> None:
    """At a size above 1 the groups are cut whoever reads the list, but where another engine serves."""
    if _engine_tp(subject) > 1 and subject.engine == "sglang":
        require_quantized(subject)
    else:
        _packed_for_sglang(subject)
    config = config_or_none(subject)
    if config is not None and int4_format_of(config) is None:
        raise NotApplicable(f"no weight is packed as INT4: {describe_quantization(config)}")


@check("CK309", preflight=True, applies_to=_packed_for_sglang)
def zero_points_read(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The layout of routed experts' zero points by config.json, where SGLang is to load them (files: CK303)."""
    config = config_or_none(subject)
    form = int4_format_of(config) if config else None
    names = names_of(subject)
    if not (weights := sum(name.endswith((".weight", PACKED)) for name in names)):
        raise CannotCheck("no tensor is the weight of a layer", "CK104")
    tally.compared(weights)
    layout = quirk("sglang", "zero-points-of-experts")
    if form is not None and not form.sglang_experts and layout is not None:
        expected = "zero points of experts as SGLang reads them, [groups, rows / 8] in AWQ's order"
        shifted = [name for name in names if name.endswith(ZERO_POINT) and is_expert(name)]
        hint = "quantize them again symmetrically, or with --reader sglang; or serve with vLLM, and give --reader vllm"
        yield Issue(expected, layout.message, hint, names=shifted)


@check("CK307", preflight=True, applies_to=_cut_for_sglang)
def tiles_divide(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Rows and columns of every packed weight on a rank, by the rules of SGLang's kernels (`quant/ignore/tiles.py`).

    On one rank, where SGLang is a reader that counts: whether there is any kernel for them.
    """
    config = require_config(subject)
    packed, shapes, groups = set(packed_in(subject.hf_files.specs)), expected_hf(config), groups_of(config)
    chosen = [
        TensorSpec(name, shape, subject.hf_files.specs[name.removesuffix(".weight") + PACKED].dtype)
        for name, shape in shapes.items()
        if name.removesuffix(".weight") in packed
    ]
    if not chosen:
        raise CannotCheck("nothing is packed", "CK302")
    tally.compared(len(chosen))
    try:
        tree = class_tree(config)
    except CkptkitError as error:
        raise CannotCheck(f"no decision for this model: {error.message}") from error
    packable = [spec for spec in chosen if spec.name.removesuffix(".weight") in tree.packable]  # others are for CK301
    by_size = by_key(
        (int4_format_in(config, groups, spec.name.removesuffix(".weight")).group, spec) for spec in packable
    )
    dp_attention = _engine_tp(subject) > 1 and subject.arguments and subject.arguments.dp_attention
    if dp_attention and any(spec.name.removesuffix(".weight") not in tree.experts for spec in packable):
        raise CannotCheck(
            "--sglang-enable-dp-attention cuts attention over fewer ranks than the rest, which is not worked out here"
        )
    for size, specs in by_size.items():
        yield from _tile_issues(subject, specs, tree, config, size)


def _tile_issues(
    subject: Subject, specs: list[TensorSpec], tree: ClassTree, config: Mapping[str, Any], size: int | None
) -> Iterator[Issue]:
    """What does not fit of weights in groups of one size."""
    tp, ep = _engine_tp(subject), (subject.arguments and subject.arguments.engine_ep) or 1
    if tp == 1:
        if fault := tiles.unrunnable(specs, tree, config, size):
            hint, details = fault
            actual = f"SGLang's INT4 kernels have no tile for {'; '.join(details)}: an engine ends at its first prompt"
            hint = f"quantize again and {hint}; or serve with vLLM, and give --reader vllm"
            yield Issue("INT4 weights that a kernel of SGLang can run", actual, hint)
        return
    try:
        tiles.check_tiles(specs, tree, config, size, tp, ep)
    except CkptkitError as error:
        yield Issue(f"INT4 weights that {tp} ranks can share", error.message, error.hint or "")


@check("CK308", applies_to=require_quantized)
def scales_alike(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The median scale of every packed weight is within 32 times that of its kind over all layers and experts.

    Scales of two formats, of two widths or of blocks of other sizes are of two kinds. Much smaller is a warning only:
    experts that training never chose keep small weights.
    """
    sizes: dict[object, dict[str, float]] = defaultdict(dict)  # by format
    if stores_floats(subject):
        for one in float_scales_of(subject):
            tally.compared(nbytes=one.nbytes)
            if one.median is not None:
                sizes[one.stored.layout][one.stored.scale] = one.median
    if not stores_floats(subject) or packs_integers(subject):
        config, _, _ = packed_weights(subject)
        groups = groups_of(config)
        for scale in read_scales(subject):
            tally.compared(nbytes=scale.nbytes)
            if scale.median is not None:
                sizes[int4_format_in(config, groups, scale.module)][scale.module + SCALE] = scale.median
    for several, names in ((one, names) for one in sizes.values() for names in group_by_pattern(one)):
        usual = median(several[name] for name in names)
        expected = f"scales around {usual:.3g}, as others of this kind"
        large = [name for name in names if several[name] > usual * _MAX_FACTOR]
        small = [name for name in names if several[name] * _MAX_FACTOR < usual]
        if large:
            yield Issue(expected, f"around {several[large[0]]:.3g}: far larger", names=large)
        if small:
            yield Issue(expected, f"around {several[small[0]]:.3g}: far smaller", names=small, severity="warning")
