"""CK301 to CK304: packed INT4 weights; those in floats are looked at by `floats`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckptkit.converters.planner import dims_of, expected_hf, rules_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import declared_quantization, describe_quantization, quantization_of
from ckptkit.quant.formats.groups import Group, groups_of, targets_of
from ckptkit.quant.formats.packing import is_expert
from ckptkit.quant.formats.part_names import PACKED, SCALE, SHAPE, packed_in
from ckptkit.quant.formats.scheme import listed
from ckptkit.quant.ignore.agree import NOTHING_PACKED
from ckptkit.quant.ignore.names import matrices_of, spell
from ckptkit.quant.ignore.readers import BY_CLASS, counting
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tiles import UNPACKED, fused_in_transformers
from ckptkit.quant.ignore.tree import class_tree
from ckptkit.verify.checks.headers.renamed import renamed_of
from ckptkit.verify.checks.quantization.cache import cache_scales
from ckptkit.verify.checks.quantization.floats import (
    float_lists,
    float_parts,
    float_scales,
    forbidden_floats,
    stores_floats,
)
from ckptkit.verify.checks.quantization.quantization_config import config_issue, refused_parts, second_config
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.agreement import agreement
from ckptkit.verify.evidence.expected import config_of, is_quantized, packed_parts, usable_config, weights_in
from ckptkit.verify.evidence.floats.stored import stored_floats_of
from ckptkit.verify.evidence.folding import group_by_pattern
from ckptkit.verify.evidence.packed import (
    Int4Format,
    Scale,
    int4_format,
    int4_format_in,
    int4_format_of,
    part_shapes,
    read_scales,
)
from ckptkit.verify.evidence.rounding import keeps_scales, names_grid

_NEVER = {"output_layer.weight": "the output layer", "shared_experts.gate_weight": "the shared expert's gate"}
_NEVER_OF_KIND = {"Embedding": "the token embedding", "Router": "the router"}


def require_quantized(subject: Subject) -> None:
    """For checks of quantized weights. Raises NotApplicable where a checkpoint has none."""
    if subject.is_megatron:
        raise NotApplicable("Megatron holds no INT4 weights")
    config = usable_config(subject)
    if config is not None and not is_quantized(config):
        raise NotApplicable(describe_quantization(config))


def _declares_quantization(subject: Subject) -> None:
    """As `require_quantized`, but a quantized cache of keys and values will do."""
    config = None if subject.is_megatron else usable_config(subject)
    if config is None or declared_quantization(config) is None:
        require_quantized(subject)


def _quantized(subject: Subject) -> tuple[Mapping[str, Any], Mapping[str, TensorSpec], Int4Format]:
    """Config, specs and format. Raises NotApplicable where no group of the config packs integers."""
    config = config_of(subject)
    form = int4_format_of(config)
    if form is None:
        raise NotApplicable(
            "quantization_config describes no packed integer weights, which is all that is checked here"
        )
    return config, subject.checkpoint.specs, form


def packed_weights(subject: Subject) -> tuple[Mapping[str, Any], Mapping[str, TensorSpec], Int4Format]:
    """As `_quantized`, and raises NotApplicable where nothing at all is packed, which CK302 judges."""
    config, specs, form = _quantized(subject)
    if not any(packed_in(specs)):
        raise CannotCheck("nothing is packed", "CK302")
    return config, specs, form


def packs_integers(subject: Subject) -> bool:
    """Whether INT4 stands beside weights in floats."""
    return int4_format_of(subject.hf_files.config) is not None and any(packed_in(subject.hf_files.specs))


@once
def never_packed(subject: Subject) -> dict[str, str]:
    """Modules that no reader expects packed, and what each is: routers, embedding, head, norms."""
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
def nothing_forbidden(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Compares the packed set with the modules of other classes: by name alone a router looks like a Linear."""
    if stores_floats(subject):
        yield from forbidden_floats(subject, never_packed(subject), tally)
        if not packs_integers(subject):
            return
    config, specs, _ = _quantized(subject)
    forbidden = never_packed(subject)
    tally.compared(len(forbidden))
    wrong = [module for module in forbidden if module + PACKED in specs and not _targeted(module, config)]
    for names in group_by_pattern(wrong):
        hint = f"quantize again with '{spell(names[0])}' in ignore, which every reader takes alike"
        packed = [name + PACKED for name in names]
        yield Issue(f"{forbidden[names[0]]} unquantized", "packed as INT4", hint, names=packed)


def _targeted(module: str, config: Mapping[str, Any]) -> bool:
    """Whether a config group names the output layer itself, which is the one way to ask for it packed."""
    groups = quantization_of(config)["config_groups"].values()
    return module == "lm_head" and any(
        module in (group.get("targets") or []) for group in groups if isinstance(group, dict)
    )


@check("CK302", preflight=True, applies_to=require_quantized)
def expected_packed(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The packed set on disk against what each reader of `ignore` looks for; what CK301 names is not repeated.

    What the readers that count would load or send wrongly is an error (`ckptkit.quant.ignore.readers.severity_of`).
    Where the files are as these read the list, and only others take it otherwise, that is a warning with the portable
    spelling. Where transformers was asked for, experts that it cannot load packed are an error too.
    """
    if renamed_of(subject) is not None:
        raise CannotCheck("not run because the tensors have other names than config.json promises", "CK104")
    config, specs = config_of(subject), subject.checkpoint.specs
    announced = stored_floats_of(subject)[0] is not None and not any(packed_in(specs))
    if announced or (stores_floats(subject) and not packs_integers(subject)):
        yield from float_lists(subject, tally)
        return
    packed = set(packed_in(specs))
    tally.compared(len(packed))
    if (issue := config_issue(config, subject.readers, subject.engine)) is not None:
        if not packed:
            raise _nothing_packed(config, issue.actual)
        yield issue
        return
    yield from refused_parts(config, subject.readers, subject.engine)
    try:
        found = agreement(specs, config, subject.readers, subject.engine, subject.updated)
    except CkptkitError as error:
        raise CannotCheck(f"no decision for this quantization_config: {error.message}") from error
    tally.compared(found.looked_at - len(packed))
    yield from found.issues
    if not packed and not found.missing:
        actual = "nothing is packed, and no reader expects packed weights"
        yield Issue("INT4 weights, as config.json declares", actual, NOTHING_PACKED, file="config.json")
    by_ck301 = {module for module in never_packed(subject) if not _targeted(module, config)}
    for module in sorted(found.forbidden.keys() - by_ck301):
        yield Issue(f"unquantized: {found.forbidden[module]}", "packed as INT4", names=[module + PACKED])
    yield from _not_for_transformers(subject, config, packed)
    by_name = [target.pattern for target in targets_of(groups_of(config))] != ["Linear"]
    hint = "name it in `targets` of its config group" if by_name else "take it out of ignore, or quantize again"
    unwanted = [name + PACKED for name in found.unwanted]
    yield Issue("unquantized, by config.json", "packed as INT4", hint, names=unwanted)
    hint = "add it to ignore, or quantize again; if nothing is packed, remove quantization_config"
    missing = [f"{name}.weight" for name in found.missing]
    yield Issue("packed as INT4, by config.json", "unquantized", hint, names=missing)


def _not_for_transformers(subject: Subject, config: Mapping[str, Any], packed: Iterable[str]) -> Iterator[Issue]:
    """Packed experts, where transformers is a reader that counts and builds them as one parameter.

    Raises CannotCheck where transformers cannot build the model from config.json.
    """
    experts = sorted(name + PACKED for name in packed if is_expert(name + PACKED))
    if not experts or "transformers" not in (subject.readers or ()):
        return
    try:
        reason = fused_in_transformers(config)
    except CkptkitError as error:
        raise CannotCheck(f"how transformers treats packed experts is not known: {error.message}") from error
    if reason is not None:
        hint = f"serve it with SGLang or vLLM, or quantize again and {UNPACKED}"
        yield Issue("experts that transformers loads", reason, hint, names=experts)


def _nothing_packed(config: Mapping[str, Any], actual: str) -> NotApplicable | CannotCheck:
    """Releases in FP8 and MXFP4 pack nothing; of an unknown format nobody can say what should be packed."""
    from ckptkit.quant.formats.dequantize import format_of as stored_format

    try:
        stored_format(config)
    except CkptkitError as error:
        return CannotCheck(f"no decision for this quantization_config: {error.message}")
    return NotApplicable(f"nothing is packed, and what quantization_config says is not checked here: {actual}")


@check("CK303", preflight=True, applies_to=_declares_quantization)
def parts_fit(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Shape and dtype of every part: words int32 [rows, columns x bits / 32], scale [rows, groups], shape int64 [2]."""
    yield from second_config(subject.path, subject.readers)
    yield from cache_scales(subject, tally)
    try:
        require_quantized(subject)
    except NotApplicable:  # only the cache of keys and values is quantized
        return
    if stores_floats(subject):
        yield from float_parts(subject, tally)
        if not packs_integers(subject):
            return
    config, specs, _ = packed_weights(subject)
    shapes, groups = expected_hf(config), groups_of(config)
    by_targets = _by_targets(subject, config, groups)
    for module in packed_in(specs):
        shape = shapes.get(f"{module}.weight")
        if shape is None or len(shape) != 2:
            continue
        usual = {0: (weights_in(config, groups, module), "")}
        for weights, why in by_targets.get(module, usual).values():
            form, parts = int4_format(weights) or int4_format_in(config, groups, module), packed_parts(weights)
            group = "one scale a row" if form.group is None else f"group_size {form.group}"
            hint = f"config.json says {form.bits} bits, {group}{why}: quantize again, or correct it"
            for part, (want_shape, dtypes) in part_shapes(form, shape, module).items():
                spec = specs.get(f"{module}.{part}")
                if spec is None or part not in parts:
                    continue
                tally.compared()
                if spec.shape != want_shape or spec.dtype not in dtypes:
                    expected, actual = f"{list(want_shape)} {' or '.join(dtypes)}", f"{list(spec.shape)} {spec.dtype}"
                    yield Issue(expected, actual, hint, names=[spec.name])


def _by_targets(
    subject: Subject, config: Mapping[str, Any], groups: Sequence[Group]
) -> Mapping[str, Mapping[int, tuple[Mapping[str, Any], str]]]:
    """Of several groups, the `weights` by which the readers that count read each module, and by which target.

    compressed-tensors tries targets by the alphabet, engines as they are listed. Empty where the model is not known.
    """
    found: dict[str, dict[int, tuple[Mapping[str, Any], str]]] = defaultdict(dict)
    with suppress(CkptkitError):  # CK302 says that the model is not known
        tree = class_tree(config) if len(groups) > 1 else None
        matrices = matrices_of(subject.hf_files.specs, tree, config) if tree else []
        readers = (*(BY_CLASS[:1] if subject.readers is None else ()), *counting(subject.readers, subject.engine))
        readings = read_all(readers, matrices, listed(quantization_of(config), "ignore"), config, targets_of(groups))
        for reader in readers:
            for matrix, target in zip(matrices, readings[reader].targets, strict=False):
                if target is not None and target.kind == "packs":
                    why = f" by the target {target.pattern!r}, which {reader} takes"
                    found[matrix.module].setdefault(target.group, (groups[target.group].weights, why))
    return found


@check("CK304", explained_by=("CK204",), applies_to=require_quantized)
def scales_sane(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Reads every scale and weight_shape, which are a small part of the checkpoint.

    Readers multiply by a scale with its sign (compressed-tensors `_dequantize`, the Marlin kernels of SGLang), so a
    negative one is wrong only on a grid that has none (`_is_signed`).
    """
    if stores_floats(subject):
        yield from float_scales(subject, tally)
        if not packs_integers(subject):
            return
    config, _, form = packed_weights(subject)
    shapes, scales = expected_hf(config), read_scales(subject)
    signed = _is_signed(config, form, scales)
    for scale in scales:
        tally.compared(nbytes=scale.nbytes)
        want, names = shapes.get(f"{scale.module}.weight"), [scale.module + SCALE]
        if want is not None and scale.shape is not None and scale.shape != want:
            yield Issue(str(list(want)), str(list(scale.shape)), names=[scale.module + SHAPE])
        if scale.not_finite:
            yield Issue("finite scales", "NaN or infinity", names=names)
        elif scale.zero:
            yield Issue("scales other than zero", f"{scale.zero} of {scale.values} are zero", names=names)
        elif scale.negative and not signed:
            yield Issue("scales above zero", f"{scale.negative} of {scale.values} are negative", names=names)
    if signed and (negative := sum(scale.negative for scale in scales)):
        values = sum(scale.values for scale in scales)
        tally.note(f"CK304: {negative} of {values} scales are negative, as AutoRound's are; readers keep their sign")


def _is_signed(config: Mapping[str, Any], form: Int4Format, scales: Sequence[Scale]) -> bool:
    """Whether negative scales belong to the grid: a symmetric one that is not ckptkit's.

    Such a scale has the sign of the group's largest weight, so of all about half are negative; where it is less than
    one in a hundred, these are faults. Scales that were kept from another checkpoint may be any part of all.
    """
    if not form.symmetric or names_grid(config):
        return False
    return keeps_scales(config) or 100 * sum(one.negative for one in scales) >= sum(one.values for one in scales)
