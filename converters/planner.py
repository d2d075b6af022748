"""Expands a family's rules over a checkpoint into a plan, which is checked before any byte is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.experts import fuse, is_fused, unfuse
from ckptkit.converters.foreign import refuse_adapters
from ckptkit.converters.megatron.hybrid_model import hybrid_mappings, is_hybrid
from ckptkit.converters.ops.basic import Copy, GateUp, GateUpInOne, ZeroPadded
from ckptkit.converters.ops.shapes import Shape
from ckptkit.converters.passthrough import passthrough_names
from ckptkit.converters.registry import family_of, named_family_of
from ckptkit.converters.rules import ParamMapping
from ckptkit.converters.stored import adapt_config
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import COMPUTED, torch_dtype
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, Step, View, require
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import is_quantized, main_dtype

if TYPE_CHECKING:
    from torch import Tensor

MCORE, HYBRID = "mcore", "hybrid"
DIALECTS = (MCORE, "slime", HYBRID)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for one layer and expert: the Megatron name, its HF names with shapes, and the mapping."""

    megatron: str
    hf: Mapping[str, Shape]
    mapping: ParamMapping

    @property
    def megatron_shape(self) -> Shape:
        """Shape of the Megatron tensor."""
        return self.mapping.megatron_shape


def dims_of(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of the model of an HF config. Raises CkptkitError for an unknown model_type or a missing key."""
    return family_of(config).read_dims(config)


def mappings_of(config: Mapping[str, Any], dialect: str = MCORE) -> tuple[ParamMapping, ...]:
    """The model's rules, not yet expanded. A `dialect` unknown to the family means the names of GPTModel.

    A model that only HybridModel supports has HybridModel's names in every dialect.
    """
    family = family_of(config)
    dims = family.read_dims(config)
    if dialect == HYBRID and not dims.pattern:
        return hybrid_mappings(family.mappings(dims))
    return (family.mappings if dims.pattern else family.dialects.get(dialect, family.mappings))(dims)


def default_dialect(config: Mapping[str, Any]) -> str:
    """The default dialect of a model: GPTModel's names if GPTModel supports it."""
    return HYBRID if dims_of(config).pattern else MCORE


def rules_of(config: Mapping[str, Any], dialect: str = MCORE) -> Iterator[Rule]:
    """Every rule, expanded over layers and experts, with one HF name per expert. `dialect` like in `mappings_of`."""
    experts = dims_of(config).experts
    for mapping in mappings_of(config, dialect):
        for megatron, names in mapping.expand(experts):
            yield Rule(megatron, dict(zip(names, mapping.hf.values(), strict=True)), mapping)


def dialect_of(config: Mapping[str, Any], names: Collection[str]) -> str:
    """The dialect of these Megatron names, or GPTModel's if none fits, so that errors use its names."""
    if is_hybrid(names) or dims_of(config).pattern:
        return HYBRID
    if not (dialects := family_of(config).dialects):
        return MCORE
    fitting = (one for one in (MCORE, *dialects) if all(rule.megatron in names for rule in rules_of(config, one)))
    return next(fitting, MCORE)


def rules_for_names(config: Mapping[str, Any], names: Collection[str]) -> list[Rule]:
    """The rules of the model in the dialect of these Megatron names."""
    return list(rules_of(config, dialect_of(config, names)))


def expected_hf(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Name and shape of every HF tensor that this config requires, with one name per expert."""
    return {name: shape for rule in rules_of(config) for name, shape in rule.hf.items()}


def copies_of(config: Mapping[str, Any]) -> dict[str, str]:
    """HF tensors that may repeat another one in a release -> the name of that tensor."""
    return {copy: next(iter(mapping.hf)) for mapping in mappings_of(config) for copy in mapping.copies}


def tied_head(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """HF names of output layer and embedding if the config ties them (a release may store both), else None."""
    dims = dims_of(config)
    return (dims.head, copies_of(config)[dims.head]) if dims.tied else None


def to_megatron(source: Checkpoint, where: str, dtype: str | None = None, dialect: str = MCORE) -> View:
    """Views an HF checkpoint, with fused experts or not, as Megatron's global tensors, without passthrough tensors.

    MTP layers without any stored tensor are omitted, also from the view's config.

    `dtype` casts floating tensors except fp32 state. Raises CkptkitError naming every tensor that is missing,
    unexpected or of the wrong shape, before any tensor is read.
    """
    if is_quantized(source.config):
        message = f"{where} is quantized (config.json has quantization_config)"
        raise CkptkitError(message, "dequantize the checkpoint first: `ckptkit quantize SRC DST --scheme none`")
    named_family_of(source.config)  # raises for a family without Megatron names
    if is_fused(source.specs):
        source = View(source, unfuse(source.specs, source.config, where))
    config = adapt_config(source.config, source.specs)
    rules = list(rules_of(config, dialect))
    require(where, [name for rule in rules for name in rule.hf], source.specs)
    passthrough = set(passthrough_names(source))
    converted = [name for name in source.specs if name not in passthrough]
    steps = [_merge_step(rule, source.specs, dtype) for rule in rules]
    return View(source, Plan(tuple(steps), converted, where=where, config=config))


def to_hf(
    source: Checkpoint, where: str, *, fused: bool = False, dtype: str | None = None, release: Collection[str] = ()
) -> View:
    """Views Megatron's global tensors as an HF checkpoint; the inverse of `to_megatron`.

    `fused` selects transformers v5's 3-D expert tensors. `release`: the names in the release; tensors that it repeats
    are repeated, and only experts that it fuses are fused. MTP layers without any tensor are omitted. The dialect
    follows from the names. Padded vocabulary rows are removed. Raises errors like `to_megatron`.
    """
    refuse_adapters(source.specs, where)
    config = adapt_config(source.config, source.specs, release)
    rules = rules_for_names(config, source.specs)
    require(where, [rule.megatron for rule in rules], source.specs)
    main = main_dtype(source.specs) or "bfloat16"
    steps = [_split_step(rule, source.specs[rule.megatron], dtype, main, release) for rule in rules]
    view = View(source, Plan(tuple(steps), source.specs, where=where, config=config))
    return View(view, fuse(view.specs, config, where, release)) if fused else view


_WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}


def _target(spec: TensorSpec, rule: Rule, dtype: str | None) -> str:
    """The dtype to write. Raises CkptkitError for a dtype that models are not trained in."""
    if spec.dtype not in COMPUTED:
        hint = "restore quantization_config in config.json, or start from the unquantized release"
        raise CkptkitError(f"{spec} is neither bfloat16, float16 nor float32", hint)
    return spec.dtype if dtype is None or rule.mapping.fp32 else dtype


def _cast(name: str, tensor: Tensor, target: str) -> Tensor:
    """Casts a tensor. Raises CkptkitError if a finite value does not fit the dtype."""
    result = tensor.to(torch_dtype(target))
    if target == "float16" and tensor.dtype != result.dtype and bool((result.isinf() & tensor.isfinite()).any()):
        message = f"{name} has values too large for float16 (largest {float(tensor.abs().max()):.3g})"
        raise CkptkitError(message, "pass --dtype bfloat16 or float32")
    return result


def _check_shape(spec: TensorSpec, expected: Shape, *, may_pad: bool = False) -> None:
    padded = may_pad and spec.shape[:1] > expected[:1] and spec.shape[1:] == expected[1:]
    if spec.shape != expected and not padded:
        hint = "restore config.json or this shard from the release: they belong to different models"
        raise CkptkitError(f"{spec} is stored, but config.json requires shape {list(expected)}", hint)


def _merge_step(rule: Rule, specs: Mapping[str, TensorSpec], dtype: str | None) -> Step:
    inputs = [specs[name] for name in rule.hf]
    for spec in inputs:
        _check_shape(spec, rule.hf[spec.name])
    if len({spec.dtype for spec in inputs}) > 1:
        raise CkptkitError(
            f"tensors of different dtypes make one Megatron tensor: {'; '.join(map(str, inputs))}", "pass --dtype"
        )
    narrow = _target(inputs[0], rule, dtype)
    target = _WIDER[narrow] if rule.mapping.upcast else narrow
    copies = [name for name in rule.mapping.copies if name in specs]
    for name in copies:
        _check_shape(specs[name], rule.hf[inputs[0].name])

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        _check_copies(tensors[0], dict(zip(copies, tensors[len(inputs) :], strict=True)), inputs[0].name)
        parts = tensors[: len(inputs)]
        _check_padding(rule, parts)
        if not rule.mapping.upcast:
            return [_cast(rule.megatron, rule.mapping.op.merge(parts), target)]
        parts = [_cast(rule.megatron, tensor, narrow) for tensor in parts]
        merged = rule.mapping.op.merge([part.to(torch_dtype(target)) for part in parts])
        _check_exact(rule, parts, merged)
        return [merged]

    output = TensorSpec(rule.megatron, rule.megatron_shape, target)
    return Step(
        (*rule.hf, *copies),
        (output,),
        run,
        type(rule.mapping.op).__name__,
        _passes(rule, inputs[0], target) and not copies,
    )


def _passes(rule: Rule, spec: TensorSpec, target: str) -> bool:
    """Whether a rule only concatenates the bytes of its HF tensors."""
    return type(rule.mapping.op) in (Copy, GateUp, GateUpInOne) and spec.dtype == target and not rule.mapping.upcast


def _check_exact(rule: Rule, parts: Sequence[Tensor], merged: Tensor) -> None:
    for name, part, back in zip(rule.hf, parts, rule.mapping.op.split(merged), strict=True):
        if not back.to(part.dtype).equal(part):
            hint = f"compare it with the release: {rule.megatron} stores weight - 1, which is inexact near 0"
            raise CkptkitError(f"{name} has values that {rule.megatron} would round", hint)


def _check_padding(rule: Rule, parts: Sequence[Tensor]) -> None:
    op = rule.mapping.op
    if isinstance(op, ZeroPadded) and not op.is_padded(parts[0]):
        message = f"{next(iter(rule.hf))} has values other than 0 in its padding, after the first {op.size}"
        raise CkptkitError(message, f"compare the tensor with the release: {rule.megatron} does not store the padding")


def _check_copies(tensor: Tensor, copies: Mapping[str, Tensor], name: str) -> None:
    for copy, content in copies.items():
        if content.dtype != tensor.dtype or not content.equal(tensor):
            reason = "the copy was trained separately, which Megatron does not support"
            if copy.endswith("lm_head.weight"):
                reason = "tie_word_embeddings must be false in config.json"
            hint = f"compare both with the release: one of them is stale, or {reason}"
            raise CkptkitError(f"{copy} differs from {name}, but Megatron has one tensor for both", hint)


def _split_step(rule: Rule, spec: TensorSpec, dtype: str | None, main: str, release: Collection[str]) -> Step:
    expected = rule.megatron_shape
    _check_shape(spec, expected, may_pad=rule.mapping.vocab)
    # Megatron may have saved the tensor in the next wider dtype or in the model's dtype.
    narrow = dtype or ("float32" if spec.dtype == "float64" else main)
    target = narrow if rule.mapping.upcast else _target(spec, rule, dtype)
    copies = [name for name in rule.mapping.copies if name in release]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        tensor = tensors[0][: expected[0]]
        if rule.mapping.upcast:
            tensor = tensor.to(torch_dtype(_WIDER.get(spec.dtype, spec.dtype)))
        parts = [_cast(rule.megatron, part, target) for part in rule.mapping.op.split(tensor)]
        return parts + [parts[0]] * len(copies)

    shapes = list(rule.hf.items()) + [(name, next(iter(rule.hf.values()))) for name in copies]
    outputs = tuple(TensorSpec(name, shape, target) for name, shape in shapes)
    return Step(
        (rule.megatron,), outputs, run, type(rule.mapping.op).__name__, _passes(rule, spec, target) and not copies
    )
