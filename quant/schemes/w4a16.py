"""The scheme of INT4 weights in groups, eight to an int32 word (compressed-tensors pack-quantized).

`N.weight` becomes `N.weight_packed`, `N.weight_scale`, `N.weight_shape` and, if asymmetric, `N.weight_zero_point`.
Weights of an INT4 checkpoint keep its scales if these still give the weight. A fresh scale could change them: it
depends on the group's largest weight, which may not be at the end of the original grid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ckptkit.converters.stored import adapt_config
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import dtype_name, torch_dtype
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import require
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.remote import config_at
from ckptkit.formats.hf.side_files import describe_quantization, quantization_of
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.grids import check, dequantize
from ckptkit.quant.formats.packing import (
    CODES_PER_WORD,
    Packed,
    check_zero_point_layout,
    is_expert,
    pack,
    pack_zero_point,
    to_sglang_zero_points,
    unpack_zero_point,
)
from ckptkit.quant.formats.part_names import PACKED, SCALE, SHAPE, ZERO_POINT, packed_in, unpacked_name
from ckptkit.quant.formats.scheme import GRIDS, KEPT_SCALES, Grid, QuantScheme, Search, parse, quantization_config
from ckptkit.quant.ignore import tiles
from ckptkit.quant.ignore.matching import ignored
from ckptkit.quant.ignore.select import default_ignore, nothing_left, select_int4_weights
from ckptkit.quant.ignore.tiles import refuse_for_transformers
from ckptkit.quant.ignore.tree import class_tree
from ckptkit.quant.kernels.dispatch import quantize_pack
from ckptkit.quant.kernels.rounding_error import int4_error
from ckptkit.quant.schemes.interface import Request, SquaredError

_BLOCK = 1 << 20  # weights at a time: temporaries stay in the cache


@dataclass(frozen=True)
class StoredScheme:
    """The declaration of scales in the config of an INT4 checkpoint."""

    group_size: int | None  # None: one scale a row
    symmetric: bool
    grid: Grid | None = None  # None: another tool wrote the config
    scale_dtype: torch.dtype | None = None  # None: the weight's
    kept_scales: bool = False  # some scales may be on another grid


def stored_scheme(config: Mapping[str, Any]) -> StoredScheme | None:
    """Reads the scales of a config.json, or None for other formats than INT4. Raises CkptkitError for unknown ones."""
    from ckptkit.quant.formats.dequantize import format_of
    from ckptkit.quant.formats.packing import PackedInt4

    if quantization_of(config) is None or not isinstance(form := format_of(config), PackedInt4):
        return None
    weights = next(iter(parse(quantization_of(config)).config_groups.values())).weights
    grid, kept_scales = weights.observer_kwargs.get("grid"), weights.observer_kwargs.get(KEPT_SCALES) is True
    return StoredScheme(form.group, form.symmetric, grid if grid in GRIDS else None, weights.scale_dtype, kept_scales)


def stored_parts(reference: Checkpoint, module: str, symmetric: bool) -> Packed | None:
    """Reads the packed parts of a module, or None if it is not packed. Raises CkptkitError if a part is missing."""
    names = [module + PACKED, module + SCALE, *([] if symmetric else [module + ZERO_POINT])]
    if names[0] not in reference.specs:
        return None
    if missing := [name for name in names if name not in reference.specs]:
        message = f"the reference has {names[0]} but no {missing[0]}"
        raise CkptkitError(message, "download the missing shard, or pass no reference")
    words, scale, *zero_point = reference.read(names).values()
    return Packed(words, scale, zero_point[0] if zero_point else None)


def requantize(weight: Tensor, before: Packed, scheme: QuantScheme, name: str) -> Packed:
    """Packs [rows, columns]; groups that the scales and zero points of `before` reproduce keep them.

    A group keeps its scale if (code - zero point) x scale, with code = round(w / scale) + zero point in -8..7, equals
    each of its weights in the weight's dtype. The sign of a zero does not count: no code holds it. Other groups get
    fresh scales. Scales are stored in the scheme's dtype, or in that of `before` if the scheme has none.
    Raises CkptkitError as `quantize_pack` does, and if `before` has other groups.
    """
    scheme = replace(scheme, scale_dtype=scheme.scale_dtype or before.scale.dtype)
    check(weight, scheme, name)
    rows, columns = weight.shape
    if before.scale.shape != (expected := (rows, scheme.groups(columns))):
        message = f"{name}: the reference has scales {list(before.scale.shape)}, not {list(expected)}"
        raise CkptkitError(message, "pass a reference of the same model")
    scale = before.scale.to(device=weight.device, dtype=scheme.scale_dtype)
    zero_point = before.zero_point
    if zero_point is not None:
        zero_point = unpack_zero_point(zero_point.to(weight.device), before.scale.shape)
    codes, reused = _codes(weight, scale, zero_point, scheme)
    if bool(reused.all()):
        return Packed.of(codes, scale, zero_point)
    (fresh,) = quantize_pack([weight], scheme, [name])
    own, new = (words.reshape(*reused.shape, -1) for words in (pack(codes), fresh.words))
    words = torch.where(reused.unsqueeze(-1), own, new)
    scale = torch.where(reused, scale, fresh.scale)
    if zero_point is not None and fresh.zero_point is not None:
        zero_point = torch.where(reused, zero_point, unpack_zero_point(fresh.zero_point, reused.shape))
    return Packed(words.flatten(1), scale, None if zero_point is None else pack_zero_point(zero_point))


def _codes(weight: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Returns codes int8 [rows, columns] for these scales, and bool [rows, groups]: the groups that they reproduce."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    reused = torch.ones(scale.shape, dtype=torch.bool, device=weight.device)
    size = scheme.group_size or weight.shape[1]
    step = max(1, _BLOCK // max(weight.shape[1], 1))
    for start in range(0, weight.shape[0] if weight.numel() else 0, step):
        block = slice(start, start + step)
        zero = None if zero_point is None else zero_point[block]
        groups = weight[block].reshape(-1, reused.shape[1], size)
        quotient = groups.float() / scale[block].float().unsqueeze(-1)
        exact = quotient.round_() if zero is None else quotient.round_().add_(zero.unsqueeze(-1))
        codes[block] = exact.nan_to_num_(nan=0.0).clamp_(-8, 7).to(torch.int8).flatten(1)
        meant = dequantize(codes[block], scale[block], zero).to(weight.dtype)
        reused[block] = (meant.reshape(groups.shape) == groups).all(-1) & scale[block].isfinite() & (scale[block] != 0)
    return codes, reused


def from_options(name: str, given: dict[str, Any], reference: str | Path | None) -> QuantScheme:
    """As `SchemeModule.from_options`."""
    group, scale_dtype = given.pop("group_size"), given.pop("scale_dtype")
    return int4_scheme(
        reference,
        group_size=int(group) if group and group != "channel" else group,
        grid=given.pop("grid"),
        symmetric=False if given.pop("asymmetric") else None,
        ignore=given.pop("ignore"),
        search=given.pop("search"),
        scale_dtype=None if scale_dtype == "auto" else torch_dtype(scale_dtype),
    )


def int4_scheme(
    reference: str | Path | None = None,
    *,
    group_size: int | Literal["channel"] | None = None,
    grid: Grid | None = None,
    symmetric: bool | None = None,
    ignore: tuple[str, ...] = (),
    search: Search = "none",
    scale_dtype: torch.dtype | None = None,
) -> QuantScheme:
    """Makes a scheme. Missing options default to those of the INT4 HF checkpoint at `reference`, a path or URL.

    Without INT4 there: groups of 128, symmetric, qmax7. Asymmetric and searched schemes are on the minmax grid, the
    only one that allows them. Raises CkptkitError as `QuantScheme` does.
    """
    config = config_at(reference) if reference else None
    stored = (stored_scheme(config) if config is not None else None) or StoredScheme(128, True)
    symmetric = stored.symmetric if symmetric is None else symmetric
    grid = grid or (stored.grid if symmetric and search == "none" else "minmax") or "qmax7"
    size = stored.group_size if group_size is None else None if group_size == "channel" else group_size
    return QuantScheme(size, grid, ignore, symmetric, search, scale_dtype or stored.scale_dtype)


@dataclass(frozen=True)
class PackedWeights:
    """The selected weights of one checkpoint, and how they become INT4."""

    scheme: QuantScheme  # with the complete `ignore` list
    names: frozenset[str]
    device: str = "cpu"
    # An INT4 checkpoint with the same groups; its scales are kept if they still give the weight.
    reference: Checkpoint | None = None
    sglang_experts: bool = False  # zero points of routed experts are in SGLang's layout (`quant.formats.packing`)
    kept_scales: bool = False  # scales of `reference` may be on another grid than that of the scheme
    notes: tuple[str, ...] = ()  # limits of engines that serve the result
    together: tuple[tuple[str, ...], ...] = ()  # weights quantized in one step, since they share a scale
    advice: str | None = None  # options with a smaller error, if any
    errors: dict[str, SquaredError] = field(default_factory=dict)  # of packed weights, by the name of their codes

    @property
    def label(self) -> str:
        """The operation on a weight, for the dry run."""
        return f"quantize {self.scheme.grid}"

    def shapes(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors of a quantized weight."""
        rows, columns = spec.shape
        groups = self.scheme.groups(columns)
        packed, scale, shape, zero_point = (
            spec.name.removesuffix(".weight") + part for part in (PACKED, SCALE, SHAPE, ZERO_POINT)
        )
        stored = self.reference.specs.get(scale) if self.reference is not None else None
        dtype = dtype_name(self.scheme.scale_dtype) if self.scheme.scale_dtype else (stored or spec).dtype
        parts = (
            TensorSpec(packed, (rows, columns // CODES_PER_WORD), "int32"),
            TensorSpec(scale, (rows, groups), dtype),
            TensorSpec(shape, (2,), "int64"),
        )
        if self.scheme.symmetric:
            return parts
        words = -(-rows // CODES_PER_WORD)
        zeros = (groups, words) if self._is_turned(spec) else (words, groups)
        return (*parts, TensorSpec(zero_point, zeros, "int32"))

    def pack(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Quantizes the weights of one step to tensors as in `shapes`, one weight after the other."""
        return [part for spec, tensor in zip(specs, tensors, strict=True) for part in self._pack(spec, tensor)]

    def _pack(self, spec: TensorSpec, tensor: Tensor) -> list[Tensor]:
        module, scheme = spec.name.removesuffix(".weight"), self.scheme
        before = stored_parts(self.reference, module, scheme.symmetric) if self.reference is not None else None
        weight = tensor.to(self.device)
        if before is not None:
            packed = requantize(weight, before, scheme, spec.name)
        else:
            (packed,) = quantize_pack([weight], scheme, [spec.name])
        words, scale, zero_point = packed.words.cpu(), packed.scale.cpu(), packed.zero_point
        zero_point = None if zero_point is None else zero_point.cpu()
        self.errors[module + PACKED] = int4_error(tensor, Packed(words, scale, zero_point))
        if zero_point is not None and self._is_turned(spec):
            zero_point = to_sglang_zero_points(zero_point, spec.shape[0], spec.name)
        parts = [words, scale, torch.tensor(spec.shape)]
        return parts if zero_point is None else [*parts, zero_point]

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of the result."""
        return quantization_config(self.scheme, sglang_experts=self.sglang_experts, kept_scales=self.kept_scales)

    def _is_turned(self, spec: TensorSpec) -> bool:
        return self.sglang_experts and is_expert(spec.name)


def select(source: Checkpoint, scheme: QuantScheme, request: Request) -> PackedWeights:
    """Selects the weights for INT4. `source` has one tensor an expert; the model's list is added to `scheme.ignore`.

    Raises CkptkitError, before anything is read, as `select_int4_weights` does, if a Linear of the model is missing, if
    transformers was chosen as a reader and cannot load the packed experts, and if nothing is left to quantize.
    """
    reference, like = _reference(source, scheme, request)
    config = adapt_config(source.config, source.specs)
    user_ignore = scheme.ignore
    scheme = replace(scheme, ignore=tuple(dict.fromkeys([*default_ignore(config, like), *user_ignore])))
    names = select_int4_weights(source.specs, config, scheme, like=like, tp=request.tp, readers=request.readers)
    chosen = [spec for name, spec in source.specs.items() if name in names]
    if not names:
        raise nothing_left(user_ignore)
    require(request.where, [f"{module}.weight" for module in sorted(class_tree(config).packable)], source.specs)
    has_experts = any(map(is_expert, names))
    if has_experts:
        refuse_for_transformers(config, request.where, request.readers)
    for_sglang = check_zero_point_layout(scheme, has_experts, request.readers)
    joins = for_sglang and engine_class("sglang", config).joins_shared_expert
    if joins and (joined := [spec.name for spec in chosen if ".shared_experts." in spec.name]):
        raise CkptkitError(
            f"{joined[0]}: SGLang stores a packed shared expert with the routed ones, but cannot load its zero points",
            r"exclude it: --ignore 're:.*\.mlp\.shared_experts\..*'; or remove --asymmetric",
        )
    notes = tiles.kernel_notes("INT4", chosen, config, scheme.group_size, request.readers)
    notes += tiles.ungated_notes("INT4", chosen, config, request.readers)
    before = stored_scheme(reference.config) if reference is not None else None
    if before is not None and (before.group_size, before.symmetric) == (scheme.group_size, scheme.symmetric):
        kept_scales = before.kept_scales or before.grid != scheme.grid
        return PackedWeights(scheme, names, request.device, reference, for_sglang, kept_scales, notes)
    advice = None
    if request.preset is None and before is None and scheme.grid == "qmax7":
        options = "--search mse" if has_experts else "--asymmetric, or --search mse,"
        advice = "qmax7 is for weights that training rounds to it (slime, Kimi K2); for other weights "
        advice += f"{options} has a smaller error (docs/quantize.md)"
    return PackedWeights(scheme, names, request.device, sglang_experts=for_sglang, notes=notes, advice=advice)


def quantize_sample(weight: Tensor, scheme: QuantScheme) -> None:
    """As `SchemeModule.quantize_sample`."""
    quantize_pack([weight], scheme, ["a sample"])


def _reference(
    source: Checkpoint, scheme: QuantScheme, request: Request
) -> tuple[Checkpoint | None, Collection[str] | None]:
    """The checkpoint that gives scales, and the names of one that decides which weights are packed."""
    stored = request.stored if request.stored is not None and stored_scheme(request.stored.config) else None
    reference = stored if request.like is None else request.like
    if request.preset:
        return reference, _names_for_rl(source)
    if request.like is not None:
        if stored_scheme(request.like.config) is None or not any(packed_in(request.like.specs)):
            declared = describe_quantization(request.like.config)
            raise CkptkitError(f"--like has no INT4 weights: {declared}", "pass an INT4 checkpoint of the same model")
        return reference, request.like.specs
    return reference, None if stored is None else _unpack_ignored(stored.specs, scheme.ignore)


def _names_for_rl(source: Checkpoint) -> dict[str, None]:
    """The names of an INT4 checkpoint with only routed experts packed, in the source's order. Raises without experts.

    SGLang cannot load other INT4 layers a second time, vLLM can; slime's training rounds nothing else.
    """
    experts = class_tree(adapt_config(source.config, source.specs)).experts
    if not experts:
        message = "--preset rl packs only routed experts, since SGLang cannot be updated with other INT4 layers; "
        hint = "serve it in BF16, or remove --preset rl if the engine is vLLM or is never updated"
        raise CkptkitError(f"{message}this model has no routed experts", hint)
    packed = {f"{module}.weight" for module in experts}
    return dict.fromkeys(name.removesuffix(".weight") + PACKED if name in packed else name for name in source.specs)


def _unpack_ignored(names: Collection[str], ignore: Sequence[str]) -> list[str]:
    """Replaces `N.weight_packed` by `N.weight` in these names for every module that an `ignore` entry covers."""
    excluded = ignored(packed_in(names), ignore)
    return [unpacked_name(name) if name.removesuffix(PACKED) in excluded else name for name in names]
