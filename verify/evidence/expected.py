"""Derives the tensors that a checkpoint must contain, with shapes, from its config and in its own layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptkit.converters.config.values import class_of
from ckptkit.converters.experts import fuse, is_fused
from ckptkit.converters.foreign import refuse_declared_format, refuse_foreign
from ckptkit.converters.planner import dims_of, rules_for_names, rules_of, tied_head
from ckptkit.converters.registry import FAMILIES, family_of, named_family_of
from ckptkit.converters.stored import PrefixMismatch, adapt_config, prefix_mismatch, refuse_older, remarks
from ckptkit.core.errors import CkptkitError, UnknownModelError, UnsupportedError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import config_in, declared_quantization, quantization_of
from ckptkit.formats.hf.side_files import is_quantized as is_quantized
from ckptkit.quant.formats import part_names
from ckptkit.quant.formats.dequantize import floats_of
from ckptkit.quant.formats.floats.layout import E4M3, MXFP4_EXPERTS, fp8
from ckptkit.quant.formats.groups import Group, group_of, groups_of
from ckptkit.quant.formats.release import Floats
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.folding import by_key, group_by_pattern

Shape = tuple[int, ...]
_Shapes = dict[str, Shape | None]  # as `Expected.shapes`
_UNREAD = Floats((fp8((None, None)), MXFP4_EXPERTS))  # usual names of parts, for unsupported formats
# Scales of keys, values and queries as compressed-tensors, llm-compressor and AutoFP8 write them.
CACHE_SCALE = re.compile(r".+\.self_attn\.(?:[kvq]_proj\.(?:[kvq]|output)|[kvq]|kv)_(?:(?:global_)?scale|zero_point)")


@dataclass(frozen=True)
class Expected:
    """The tensors that a checkpoint must contain, by name."""

    shapes: Mapping[str, Shape | None]  # None for parts of packed weights: CK303 judges their shapes
    vocab: frozenset[str] = frozenset()  # may have more rows
    fp32: frozenset[str] = frozenset()  # must not be rounded
    indices: frozenset[str] = frozenset()  # integers, which may be equal in several layers
    optional: frozenset[str] = frozenset()  # may be present, and are not used
    upcast: frozenset[str] = frozenset()  # contain the release's values in the next wider dtype


@once
def config_of(subject: Subject) -> Mapping[str, Any]:
    """The HF config, adjusted to the stored tensors by `ckptkit.converters.stored`. Raises as `raw_config_of`."""
    config, names = raw_config_of(subject), _names(subject)
    return adapt_config(config, names) if names else config


def remarks_of(subject: Subject) -> list[str]:
    """Remarks on tensor names that are no errors. Raises as `raw_config_of`."""
    names = _names(subject)
    return remarks(raw_config_of(subject), names) if names else []


@once
def spelling_of(subject: Subject) -> PrefixMismatch | None:
    """The spelling of an HF checkpoint's layers if it is that of another class, else None."""
    try:
        return prefix_mismatch(raw_config_of(subject), _names(subject)) if subject.kind == "hf" else None
    except (CkptkitError, NotApplicable, CannotCheck):
        return None


@once
def _names(subject: Subject) -> Collection[str]:
    """Every tensor name of headers, the index or `.metadata`; empty if unreadable."""
    if subject.kind == "megatron":
        # A launch that trains multi-token prediction layers requires all tensors of the config.
        is_complete = subject.arguments is not None and bool(subject.arguments.mtp)
        return subject.megatron_files.opened.specs if not is_complete and subject.megatron_files.readable else ()
    specs, index = subject.hf_files.specs, subject.hf_files.index or {}
    return specs if index.keys() <= specs.keys() else {**specs, **index}


@once
def is_of_no_family(subject: Subject) -> bool:
    """Whether config.json is of a model outside ckptkit's families."""
    try:
        named_family_of(subject.hf_files.config)
    except UnsupportedError as error:
        # An unknown `model_type` with the class of a family is a mistake in config.json (CK101).
        return not isinstance(error, UnknownModelError) or has_own_class(subject.hf_files.config)
    except CkptkitError:
        pass
    return False


def has_own_class(config: Mapping[str, Any]) -> bool:
    """Whether config.json names a class, and that of no known family."""
    name = class_of(config)
    return name != "" and all(name not in family.architectures for family in FAMILIES.values())


@once
def raw_config_of(subject: Subject) -> Mapping[str, Any]:
    """The stored HF config. Raises NotApplicable for a model of no family, CannotCheck without one, CkptkitError."""
    if subject.kind == "hf":
        config = subject.hf_files.config
        if subject.arguments is None and not is_quantized(config) and is_of_no_family(subject):
            model = class_of(config) or f"model_type {config['model_type']!r}"
            raise NotApplicable(f"{model} is not one of ckptkit's families: CK541 asks transformers")
    else:
        path = subject.hf_path or subject.megatron_files.weights.parent / "hf"
        if not (path / "config.json").exists():
            reason = "this Megatron checkpoint has no HF config.json next to it"
            raise CannotCheck(f"{reason}; pass the HF directory with --hf")
        config = config_in(path, subject.megatron_files.weights)
    try:
        refuse_foreign(_names(subject) if subject.kind == "hf" else (), subject.path)
        refuse_declared_format(config, subject.path)
        dims_of(config)
        if subject.kind == "hf":
            refuse_older(config, _names(subject), subject.path)
    except (TypeError, ValueError) as error:
        raise CkptkitError(f"config.json: a size is not a number: {error}", "compare it with the release") from error
    return config


@once
def expected_of(subject: Subject) -> Expected | None:
    """The tensors that the checkpoint must contain, in its layout (fused, packed), or None without a usable config."""
    if (config := config_or_none(subject)) is None:
        return None
    unread = subject.unread_names
    names: Mapping[str, Any] = {**subject.specs, **dict.fromkeys(unread)} if unread else subject.specs
    rules = rules_for_names(config, names) if subject.kind == "megatron" else list(rules_of(config))
    if subject.kind == "megatron":
        # One shape for all layers and experts of a mapping: running its op a hundred thousand times would take minutes.
        one_each = {id(rule.mapping): rule for rule in rules}
        shapes_of = {key: rule.megatron_shape for key, rule in one_each.items()}
        return Expected(
            {rule.megatron: shapes_of[id(rule.mapping)] for rule in rules},
            vocab=frozenset(rule.megatron for rule in rules if rule.mapping.vocab),
            fp32=frozenset(rule.megatron for rule in rules if rule.mapping.fp32),
            upcast=frozenset(rule.megatron for rule in rules if rule.mapping.upcast),
        )
    fp32 = frozenset(name for rule in rules if rule.mapping.fp32 for name in rule.hf)
    indices = frozenset(name for rule in rules if rule.mapping.indices for name in rule.hf)
    plain = {name: shape for rule in rules for name, shape in rule.hf.items()}
    shapes: _Shapes = dict(plain)
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
    # A release may repeat tensors under these names.
    repeated = frozenset(name for name in copies if name in names or name in subject.hf_files.unknown)
    scales = frozenset(name for kind in kinds for name in kind if is_cache_scale(name, config))
    carries = family_of(config).passes_through  # tensors outside the language model
    carried = frozenset(name for kind in kinds if carries(kind[0]) for name in kind)
    return Expected(shapes, frozenset(), fp32, indices, repeated | scales | carried)


def require_expected(subject: Subject) -> Expected:
    """As `expected_of`, but raises CannotCheck without a usable config."""
    require_config(subject)
    expected = expected_of(subject)
    assert expected is not None
    return expected


def weights_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `weights` of the first integer group in a quantization_config, else of the first group, else empty."""
    found = _all_weights(config)
    return next((weights for weights in found if weights.get("type", "int") == "int"), found[0] if found else {})


def _all_weights(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    quantization = quantization_of(config)
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    groups = groups if isinstance(groups, dict) else {}
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    return [one for one in weights if isinstance(one, dict)]


def has_floats(config: Mapping[str, Any]) -> bool:
    """Whether a config group stores weights in low-precision floats."""
    return any(weights.get("type") == "float" for weights in _all_weights(config))


def is_cache_scale(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor scales the key-value cache, and config.json has a scheme for that."""
    content = declared_quantization(config)
    keys = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_config")
    has_scheme = isinstance(content, Mapping) and any(content.get(key) is not None for key in keys)
    return has_scheme and CACHE_SCALE.fullmatch(name) is not None


def weights_in(config: Mapping[str, Any], groups: Sequence[Group], module: str) -> Mapping[str, Any]:
    """The `weights` of the integer group that targets a packed module, else as `weights_of`."""
    group = group_of(groups, module)
    return group.weights if group is not None and group.kind == "packs" else weights_of(config)


def packed_parts(weights: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts of a weight packed by these `weights` of a group (compressed-tensors `pack_quantized/base.py`)."""
    zero_point = (part_names.WEIGHT_ZERO_POINT,) if weights.get("symmetric") is False else ()
    order = (part_names.WEIGHT_G_IDX,) if weights.get("actorder") in ("group", "dynamic") else ()
    return (part_names.WEIGHT_PACKED, part_names.WEIGHT_SCALE, part_names.WEIGHT_SHAPE, *zero_point, *order)


def _packed(shapes: _Shapes, names: Mapping[str, Any], config: Mapping[str, Any]) -> _Shapes:
    """Replaces the name of every quantized weight by those of its parts."""
    floats = None
    with suppress(CkptkitError):  # an unsupported format
        floats = floats_of(config)
    if floats is None and (weights_of(config).get("type") != "int" or has_floats(config)):
        floats = _UNREAD
    # In an unsupported format, any tensor of a module except its bias may be a part of the weight.
    parts = ((name, *name.rpartition(".")) for name in (names if floats is _UNREAD else ()))
    siblings = by_key((module, name) for name, module, _, leaf in parts if leaf != "bias")
    groups: tuple[Group, ...] = ()
    with suppress(CkptkitError):  # CK302 reports them
        groups = groups_of(config)
    result: _Shapes = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if floats is not None and (found := _float_parts(name, shape, floats, names)):
            result |= found | dict.fromkeys(siblings.get(module, ()))
        elif any(one != name for one in siblings.get(module, ())):
            result |= dict.fromkeys(siblings[module])
        elif module + part_names.PACKED in names:
            result |= {f"{module}.{part}": None for part in packed_parts(weights_in(config, groups, module))}
        else:
            result[name] = shape
    return result


def _float_parts(name: str, shape: Shape | None, floats: Floats, names: Mapping[str, Any]) -> _Shapes | None:
    """The stored parts of a weight in floats, or None without any. CK303 reports missing and misshapen parts."""
    for layout in floats.layouts:
        codes = name + layout.codes
        endings = (*layout.scales, *([layout.second] if layout.second else []), *layout.inputs)
        scales = [part for ending in endings if (part := layout.part_name(name, ending)) in names]
        if codes in names and (layout.codes or scales):
            spec = names[codes]
            is_plain = spec.dtype not in ("uint8", "int8") if isinstance(spec, TensorSpec) else True
            has_shape = not isinstance(spec, TensorSpec) or (layout.number == E4M3 and not layout.codes)
            return {codes: shape if has_shape and is_plain else None} | dict.fromkeys(scales)
    return None


def refuse_stated(subject: Subject) -> None:
    """Raises UnsupportedError if ckptkit does not read such a config.json or such layer names."""
    try:
        config = subject.hf_files.config
        refuse_declared_format(config, subject.path)
        if is_of_no_family(subject):
            return
        refuse_older(config, _names(subject), subject.path)
        if is_quantized(config) and weights_of(config).get("type") != "int":
            floats_of(config)
    except CkptkitError as error:
        if error.code == UnsupportedError.code and not isinstance(error, UnknownModelError):
            raise UnsupportedError(error.message, error.hint) from error


def config_or_none(subject: Subject) -> Mapping[str, Any] | None:
    """As `config_of`, or None if the config is missing, broken or unsupported, which CK101 reports."""
    try:
        return config_of(subject)
    except (CkptkitError, NotApplicable, CannotCheck):
        return None


def require_config(subject: Subject, read: Callable[[Subject], Mapping[str, Any]] = config_of) -> Mapping[str, Any]:
    """The config as `read` returns it. Raises CannotCheck if CK101 reports it."""
    try:
        return read(subject)
    except CkptkitError as error:
        raise CannotCheck("config.json is missing or cannot be used", "CK101") from error


def tied_head_of(subject: Subject) -> tuple[str, str] | None:
    """Names of a tied output layer and of its embedding, or None."""
    config = config_or_none(subject)
    return tied_head(config) if config else None


def fp32_names(config: Mapping[str, Any] | None) -> frozenset[str]:
    """HF names of tensors that must stay float32, such as a router's selection bias."""
    return frozenset(name for rule in (rules_of(config) if config else ()) for name in rule.hf if rule.mapping.fp32)


def model_of(subject: Subject) -> str | None:
    """The model type and its number of layers, or None if the config is not usable, which CK101 reports."""
    with suppress(CkptkitError, NotApplicable, CannotCheck):
        config = raw_config_of(subject)
        return f"{config.get('model_type')}, {dims_of(config).layers} layers"
    return None
