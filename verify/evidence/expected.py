"""Derives from its config every tensor that a checkpoint must hold, with its shape, in the checkpoint's own layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptkit.converters.config.values import class_of
from ckptkit.converters.experts import fuse, is_fused
from ckptkit.converters.foreign import refuse_declared_format as refuse_stated_format
from ckptkit.converters.foreign import refuse_foreign
from ckptkit.converters.planner import dims_of, rules_for_names, rules_of, tied_head
from ckptkit.converters.registry import FAMILIES, family_of, named_family_of
from ckptkit.converters.stored import PrefixMismatch, adapt_config, prefix_mismatch, refuse_older, remarks
from ckptkit.core.errors import CkptkitError, UnknownModelError, UnsupportedError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import config_in, declared_quantization, quantization_of
from ckptkit.formats.hf.side_files import is_quantized as is_quantized
from ckptkit.quant.formats.dequantize import floats_of
from ckptkit.quant.formats.floats.layout import E4M3, MXFP4_EXPERTS, fp8
from ckptkit.quant.formats.groups import Group, group_of, groups_of
from ckptkit.quant.formats.part_names import (
    PACKED,
    WEIGHT_G_IDX,
    WEIGHT_PACKED,
    WEIGHT_SCALE,
    WEIGHT_SHAPE,
    WEIGHT_ZERO_POINT,
)
from ckptkit.quant.formats.release import Floats
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.folding import by_key, group_by_pattern

Shape = tuple[int, ...]
# The names that parts have in formats which are not read.
_UNREAD = Floats((fp8((None, None)), MXFP4_EXPERTS))
# As compressed-tensors, llm-compressor and AutoFP8 write them, of keys, values and queries.
CACHE_SCALE = re.compile(r".+\.self_attn\.(?:[kvq]_proj\.(?:[kvq]|output)|[kvq]|kv)_(?:(?:global_)?scale|zero_point)")


@dataclass(frozen=True)
class Expected:
    """The tensors that a checkpoint must hold, by name."""

    shapes: Mapping[str, Shape | None]  # None: packed, and CK303 judges the shape
    vocab: frozenset[str] = frozenset()  # may have more rows
    fp32: frozenset[str] = frozenset()  # must not be rounded
    indices: frozenset[str] = frozenset()  # whole numbers, which may be the same in several layers
    optional: frozenset[str] = frozenset()  # may be there, and are not used
    upcast: frozenset[str] = frozenset()  # hold the release's values in the next wider dtype


@once
def config_of(subject: Subject) -> Mapping[str, Any]:
    """The HF config of the checkpoint, of a supported family, as its tensors have it (`ckptkit.converters.stored`).

    Raises as `stated_config_of`. A launch that trains multi-token prediction layers needs them in the checkpoint that
    it loads.
    """
    config, names = stated_config_of(subject), _names(subject)
    return adapt_config(config, names) if names else config


def remarks_of(subject: Subject) -> list[str]:
    """Remarks on the names of its tensors that are not wrong. Raises as `stated_config_of`."""
    names = _names(subject)
    return remarks(stated_config_of(subject), names) if names else []


@once
def spelling_of(subject: Subject) -> PrefixMismatch | None:
    """How the layers of an HF checkpoint are spelled, where another class than the config's spells them so.

    None also where there is no usable config.
    """
    try:
        return prefix_mismatch(stated_config_of(subject), _names(subject)) if subject.is_hf else None
    except (CkptkitError, NotApplicable, CannotCheck):
        return None


@once
def _names(subject: Subject) -> Collection[str]:
    """Every tensor that headers, the index or `.metadata` name.

    None where nothing can be read, or where each tensor that the config promises is wanted.
    """
    if subject.is_megatron and subject.arguments is not None and subject.arguments.mtp:
        return ()
    if subject.is_megatron:
        return subject.megatron_files.opened.specs if subject.megatron_files.readable else ()
    specs, index = subject.hf_files.specs, subject.hf_files.index or {}
    return specs if index.keys() <= specs.keys() else {**specs, **index}


@once
def is_of_no_family(subject: Subject) -> bool:
    """Whether config.json is of a model outside ckptkit's families: by its `model_type` and class, or by its class.

    An unknown `model_type` with the class of a family is a mistake in config.json (CK101).
    """
    try:
        named_family_of(subject.hf_files.config)
    except UnsupportedError as error:
        return not isinstance(error, UnknownModelError) or has_own_class(subject.hf_files.config)
    except CkptkitError:
        pass
    return False


def has_own_class(config: Mapping[str, Any]) -> bool:
    """Whether config.json states a class, and of no family that is known: of one, its model_type would be another."""
    name = class_of(config)
    return name != "" and all(name not in family.architectures for family in FAMILIES.values())


@once
def stated_config_of(subject: Subject) -> Mapping[str, Any]:
    """The HF config of the checkpoint as the file has it, checked to be of a supported family.

    Raises NotApplicable for a model of no family, which transformers is asked about (CK541); CannotCheck where a
    Megatron checkpoint has none beside it; CkptkitError where it is broken or unsupported.
    """
    if subject.is_hf:
        config = subject.hf_files.config
        if subject.arguments is None and not is_quantized(config) and is_of_no_family(subject):
            model = class_of(config) or f"model_type {config['model_type']!r}"
            raise NotApplicable(f"{model} is not one of ckptkit's families: CK541 asks transformers")
    else:
        path = subject.hf_path or subject.megatron_files.weights.parent / "hf"
        if not (path / "config.json").exists():
            raise CannotCheck(
                "no HF config.json is stored next to this Megatron checkpoint; name the HF directory with --hf"
            )
        config = config_in(path, subject.megatron_files.weights)
    try:
        refuse_foreign(_names(subject) if subject.is_hf else (), subject.path)
        refuse_stated_format(config, subject.path)
        dims_of(config)
        if subject.is_hf:
            refuse_older(config, _names(subject), subject.path)
    except (TypeError, ValueError) as error:
        raise CkptkitError(f"config.json: a size is not a number: {error}", "compare it with the release") from error
    return config


@once
def expected_of(subject: Subject) -> Expected | None:
    """What must be in the checkpoint, spelled as its tensors are: fused or per expert, packed or not.

    None where there is no usable config.
    """
    if (config := usable_config(subject)) is None:
        return None
    unread = subject.unread_names
    names: Mapping[str, Any] = {**subject.specs, **dict.fromkeys(unread)} if unread else subject.specs
    rules = rules_for_names(config, names) if subject.is_megatron else list(rules_of(config))
    if subject.is_megatron:
        vocab = frozenset(rule.megatron for rule in rules if rule.mapping.vocab)
        state = frozenset(rule.megatron for rule in rules if rule.mapping.fp32)
        # One shape for all layers and experts of a mapping: running its op a hundred thousand times would take minutes.
        shapes_of = {
            id(rule.mapping): rule.megatron_shape for rule in {id(rule.mapping): rule for rule in rules}.values()
        }
        upcast = frozenset(rule.megatron for rule in rules if rule.mapping.upcast)
        return Expected({rule.megatron: shapes_of[id(rule.mapping)] for rule in rules}, vocab, state, upcast=upcast)
    fp32 = frozenset(name for rule in rules if rule.mapping.fp32 for name in rule.hf)
    indices = frozenset(name for rule in rules if rule.mapping.indices for name in rule.hf)
    plain = {name: shape for rule in rules for name, shape in rule.hf.items()}
    shapes: dict[str, Shape | None] = dict(plain)
    kinds = subject.kinds if names is subject.specs else list(group_by_pattern(names))
    if is_fused(kind[0] for kind in kinds):
        specs = {name: TensorSpec(name, shape, "bfloat16") for name, shape in plain.items()}
        steps = fuse(specs, config, "config.json", names).steps
        shapes = {spec.name: spec.shape for step in steps for spec in step.outputs}
    if (tied := tied_head(config)) and tied[0] in names:
        shapes[tied[0]] = plain[tied[1]]
    copies = dict.fromkeys(name for rule in rules for name in rule.mapping.copies)
    if is_quantized(config):
        listed = dict.fromkeys(subject.hf_files.index or {}) | dict(names)  # a scale may be listed and not stored
        shapes, copies = _packed(shapes, listed, config), _packed(copies, listed, config)
    # A release may repeat tensors under these names, and this one does.
    repeated = frozenset(name for name in copies if name in names or name in subject.hf_files.unknown)
    scales = frozenset(name for kind in kinds for name in kind if is_cache_scale(name, config))
    carries = family_of(
        config
    ).passes_through  # tensors outside the language model, by what precedes or follows the numbers
    carried = frozenset(name for kind in kinds if carries(kind[0]) for name in kind)
    return Expected(shapes, frozenset(), fp32, indices, repeated | scales | carried)


def require_expected(subject: Subject) -> Expected:
    """As `expected_of`, but raises CannotCheck where there is no usable config."""
    require_config(subject)
    expected = expected_of(subject)
    assert expected is not None
    return expected


def weights_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `weights` part of the first group of integers in a quantization_config, else of the first group.

    Empty when there is none.
    """
    found = _all_weights(config)
    return next((weights for weights in found if weights.get("type", "int") == "int"), found[0] if found else {})


def _all_weights(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    quantization = quantization_of(config)
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    given = groups.values() if isinstance(groups, dict) else ()
    found = (group.get("weights") for group in given if isinstance(group, dict))
    return [weights for weights in found if isinstance(weights, dict)]


def has_floats(config: Mapping[str, Any]) -> bool:
    """Whether a config group stores weights in floats of fewer bits, beside integers or alone."""
    return any(weights.get("type") == "float" for weights in _all_weights(config))


def is_cache_scale(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor scales the key-value cache, and config.json has a scheme for that."""
    content = declared_quantization(config)
    keys = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_config")
    stated = isinstance(content, Mapping) and any(content.get(key) is not None for key in keys)
    return stated and CACHE_SCALE.fullmatch(name) is not None


def weights_in(config: Mapping[str, Any], groups: Sequence[Group], module: str) -> Mapping[str, Any]:
    """The `weights` part of the group of integers that a packed module is a target of; else as `weights_of`."""
    group = group_of(groups, module)
    return group.weights if group is not None and group.kind == "packs" else weights_of(config)


def packed_parts(weights: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts of a weight packed by these `weights` of a group.

    Source: compressed-tensors `pack_quantized/base.py`.
    """
    zero_point = (WEIGHT_ZERO_POINT,) if weights.get("symmetric") is False else ()
    order = (WEIGHT_G_IDX,) if weights.get("actorder") in ("group", "dynamic") else ()
    return (WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, *zero_point, *order)


def _packed(
    shapes: Mapping[str, Shape | None], names: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Shape | None]:
    """Replaces every weight that is stored packed by its parts, and adds the scales of weights in floats."""
    integers = weights_of(config).get("type", "float") == "int"
    floats = None
    with suppress(CkptkitError):  # a format that is not read
        floats = floats_of(config)
    floats = floats or (None if integers and not has_floats(config) else _UNREAD)
    # In a format that is not read, any tensor of a module but its bias may be a part of the weight.
    parts = ((name, *name.rpartition(".")) for name in (names if floats is _UNREAD else ()))
    beside = by_key((module, name) for name, module, _, leaf in parts if leaf != "bias")
    groups: tuple[Group, ...] = ()
    with suppress(CkptkitError):  # CK302 says what is wrong with them
        groups = groups_of(config)
    result: dict[str, Shape | None] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if floats is not None and (found := _float_parts(name, shape, floats, names)):
            result |= found | dict.fromkeys(beside.get(module, ()))
        elif any(one != name for one in beside.get(module, ())):
            result |= dict.fromkeys(beside[module])
        elif module + PACKED in names:
            for part in packed_parts(weights_in(config, groups, module)):
                result[f"{module}.{part}"] = None
        else:
            result[name] = shape
    return result


def _float_parts(
    name: str, shape: Shape | None, floats: Floats, names: Mapping[str, Any]
) -> dict[str, Shape | None] | None:
    """The parts that are stored of a weight in floats; None where none is. What is missing or misshapen is CK303's."""
    for layout in floats.layouts:
        codes = name + layout.codes
        endings = (*layout.scales, *([layout.second] if layout.second else []), *layout.inputs)
        beside = [part for ending in endings if (part := layout.beside(name, ending)) in names]
        if codes in names and (layout.codes or beside):
            spec = names[codes]
            whole = not isinstance(spec, TensorSpec) or (layout.number == E4M3 and not layout.codes)
            packed = isinstance(spec, TensorSpec) and spec.dtype in ("uint8", "int8")
            return {codes: shape if whole and not packed else None} | dict.fromkeys(beside)
    return None


def refuse_stated(subject: Subject) -> None:
    """Raises UnsupportedError where config.json or names of layers are of a kind that ckptkit does not read.

    A config that is missing or broken names none; CK101 reports it.
    """
    try:
        config = subject.hf_files.config
        refuse_stated_format(config, subject.path)
        if is_of_no_family(subject):
            return
        refuse_older(config, _names(subject), subject.path)
        if is_quantized(config) and weights_of(config).get("type") != "int":
            floats_of(config)
    except CkptkitError as error:
        if error.code == UnsupportedError.code and not isinstance(error, UnknownModelError):
            raise UnsupportedError(error.message, error.hint) from error


def usable_config(subject: Subject) -> Mapping[str, Any] | None:
    """As `config_of`, but None where the config is missing, broken or unsupported, which CK101 reports."""
    try:
        return config_of(subject)
    except (CkptkitError, NotApplicable, CannotCheck):
        return None


def require_config(subject: Subject, read: Callable[[Subject], Mapping[str, Any]] = config_of) -> Mapping[str, Any]:
    """As `config_of`, or another reader, but raises CannotCheck where CK101 reports the config."""
    try:
        return read(subject)
    except CkptkitError as error:
        raise CannotCheck("there is no usable config.json", "CK101") from error


def tied_head_of(subject: Subject) -> tuple[str, str] | None:
    """Names of the output layer and of the embedding that it repeats; None where they are not tied, or unknown."""
    config = usable_config(subject)
    return tied_head(config) if config else None


def fp32_names(config: Mapping[str, Any] | None) -> frozenset[str]:
    """HF names of state that must stay float32, such as a router's selection bias."""
    rules = rules_of(config) if config else ()
    return frozenset(name for rule in rules for name in rule.hf if rule.mapping.fp32)


def model_of(subject: Subject) -> str | None:
    """The model in a few words, by its config; None where there is none or it cannot be read, which CK101 says."""
    with suppress(CkptkitError, NotApplicable, CannotCheck):
        config = stated_config_of(subject)
        return f"{config.get('model_type')}, {dims_of(config).layers} layers"
    return None
