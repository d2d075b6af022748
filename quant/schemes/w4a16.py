"""INT4 weights in groups, eight to an int32 word (compressed-tensors pack-quantized), as a scheme.

`N.weight` becomes `N.weight_packed`, `N.weight_scale`, `N.weight_shape` and, if asymmetric, `N.weight_zero_point`.
Weights of an INT4 checkpoint keep its scales where these still give the weight. A fresh scale could move weights that
nobody changed: it follows from the group's largest weight, which need not be at the end of the grid that it was rounded
to.
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
from ckptkit.quant.formats.part_names import PACKED, SCALE, SHAPE, ZERO_POINT, packed_in
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
    """What the config of an INT4 checkpoint says about its scales."""

    group_size: int | None  # None: one scale a row
    symmetric: bool
    grid: Grid | None = None  # None: another tool wrote the config
    scale_dtype: torch.dtype | None = None  # None: the weight's own
    kept_scales: bool = False  # scales of another grid may be among them


def stored_scheme(config: Mapping[str, Any]) -> StoredScheme | None:
    """Reads what a whole config.json says about INT4 scales; None when the weights are not INT4.

    Raises CkptkitError for a quantization that ckptkit cannot read.
    """
    from ckptkit.quant.formats.dequantize import format_of
    from ckptkit.quant.formats.packing import PackedInt4

    if quantization_of(config) is None or not isinstance(form := format_of(config), PackedInt4):
        return None
    weights = next(iter(parse(quantization_of(config)).config_groups.values())).weights
    grid = weights.observer_kwargs.get("grid")
    kept_scales = weights.observer_kwargs.get(KEPT_SCALES) is True
    known = grid if grid in GRIDS else None
    return StoredScheme(form.group, form.symmetric, known, weights.scale_dtype, kept_scales)


def stored_parts(reference: Checkpoint, module: str, symmetric: bool) -> Packed | None:
    """Reads the packed parts of a module from an INT4 checkpoint; None when the module is not packed.

    Raises CkptkitError when a part is missing.
    """
    names = [module + part for part in (PACKED, SCALE, *([] if symmetric else [ZERO_POINT]))]
    if names[0] not in reference.specs:
        return None
    if missing := [name for name in names if name not in reference.specs]:
        raise CkptkitError(
            f"the reference has {names[0]} but no {missing[0]}",
            "download the missing shard, or leave the reference out",
        )
    found = [*reference.read(names).values()]
    return Packed(found[0], found[1], None if symmetric else found[2])


def requantize(weight: Tensor, before: Packed, scheme: QuantScheme, name: str) -> Packed:
    """Packs [rows, columns]; groups that the scales and zero points of `before` reproduce keep them.

    A group keeps its scale when (code - zero point) x scale, with code = round(w / scale) + zero point in -8..7, equals
    each of its weights in the weight's dtype. The sign of a zero does not count: no code holds it. Other groups get
    fresh scales. Scales are stored in the scheme's dtype, or in that of `before` if the scheme has none.
    Raises CkptkitError as `quantize_pack` does, and when `before` has other groups.
    """
    scheme = replace(scheme, scale_dtype=scheme.scale_dtype or before.scale.dtype)
    check(weight, scheme, name)
    rows, columns = weight.shape
    if before.scale.shape != (rows, scheme.groups(columns)):
        wanted = [rows, scheme.groups(columns)]
        raise CkptkitError(
            f"{name}: the reference has scales {list(before.scale.shape)}, not {wanted}",
            "give a reference of the same model",
        )
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
    """Returns codes int8 [rows, columns] for these scales, and bool [rows, groups]: which groups they reproduce."""
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
    """Makes a scheme. Options not given default to those of the INT4 HF checkpoint at `reference`, a path or URL.

    Without one, or where that is not in INT4: groups of 128, symmetric, qmax7. Asymmetric and searched schemes are on
    the minmax grid, the only one that allows them. Raises CkptkitError as `QuantScheme` does.
    """
    config = config_at(reference) if reference else None
    known = (stored_scheme(config) if config is not None else None) or StoredScheme(128, True)
    even = known.symmetric if symmetric is None else symmetric
    chosen = grid or (known.grid if even and search == "none" else "minmax") or "qmax7"
    size = known.group_size if group_size is None else None if group_size == "channel" else group_size
    return QuantScheme(size, chosen, ignore, even, search, scale_dtype or known.scale_dtype)


@dataclass(frozen=True)
class PackedWeights:
    """Which weights of one checkpoint are quantized, and how, to INT4."""

    # With the whole `ignore` list.
    scheme: QuantScheme
    names: frozenset[str]
    device: str = "cpu"
    # An INT4 checkpoint with the same groups, whose scales are kept where they still give the weight.
    reference: Checkpoint | None = None
    # Whether zero points of routed experts are stored in the layout of SGLang (`ckptkit.quant.formats.packing`).
    sglang_experts: bool = False
    # Whether scales of `reference` may be on another grid than that of the scheme.
    kept_scales: bool = False
    notes: tuple[str, ...] = ()  # what to know before the result is served
    together: tuple[tuple[str, ...], ...] = ()  # weights quantized in one step, since they share a scale
    advice: str | None = None  # which options would lose less, where they may be used
    # How far each weight that `pack` has packed is from its source, by the name of the tensor with its codes.
    errors: dict[str, SquaredError] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What happens to a weight, for the dry run."""
        return f"quantize {self.scheme.grid}"

    def shapes(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors that a weight becomes."""
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
        """Quantizes weights, those of one step, to what `shapes` announces, one after the other."""
        return [part for spec, tensor in zip(specs, tensors, strict=True) for part in self._packed(spec, tensor)]

    def _packed(self, spec: TensorSpec, tensor: Tensor) -> list[Tensor]:
        module, scheme = spec.name.removesuffix(".weight"), self.scheme
        before = stored_parts(self.reference, module, scheme.symmetric) if self.reference is not None else None
        weight = tensor.to(self.device)
        if before is not None:
            packed = requantize(weight, before, scheme, spec.name)
        else:
            (packed,) = quantize_pack([weight], scheme, [spec.name])
        zero = packed.zero_point
        packed = Packed(packed.words.cpu(), packed.scale.cpu(), None if zero is None else zero.cpu())
        self.errors[module + PACKED] = int4_error(tensor, packed)
        parts = [packed.words, packed.scale, torch.tensor(spec.shape)]
        if (zero_point := packed.zero_point) is not None:
            turned = self._is_turned(spec)
            parts.append(to_sglang_zero_points(zero_point, spec.shape[0], spec.name) if turned else zero_point)
        return parts

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of the result."""
        return quantization_config(self.scheme, sglang_experts=self.sglang_experts, kept_scales=self.kept_scales)

    def _is_turned(self, spec: TensorSpec) -> bool:
        return self.sglang_experts and is_expert(spec.name)


def select(source: Checkpoint, scheme: QuantScheme, request: Request) -> PackedWeights:
    """Decides what becomes INT4. `source` has one tensor an expert; the model's own list is added to `scheme.ignore`.

    Raises CkptkitError, before anything is read, as `select_int4_weights` does, if a Linear of the model is missing, if
    transformers was chosen as a reader and cannot load the packed experts, and if nothing is left to quantize.
    """
    reference, like = _reference(source, scheme, request)
    config = adapt_config(source.config, source.specs)
    whole = replace(scheme, ignore=tuple(dict.fromkeys([*default_ignore(config, like), *scheme.ignore])))
    names = select_int4_weights(source.specs, config, whole, like=like, tp=request.tp, readers=request.readers)
    chosen = [spec for name, spec in source.specs.items() if name in names]
    if not names:
        raise nothing_left(scheme.ignore)
    require(request.where, [f"{module}.weight" for module in sorted(class_tree(config).packable)], source.specs)
    experts = any(map(is_expert, names))
    if experts:
        refuse_for_transformers(config, request.where, request.readers)
    special = check_zero_point_layout(whole, experts, request.readers)
    joins = special and engine_class("sglang", config).joins_shared_expert
    if joins and (joined := [spec.name for spec in chosen if ".shared_experts." in spec.name]):
        raise CkptkitError(
            f"{joined[0]}: SGLang keeps a packed shared expert among the routed ones, and cannot take its zero points",
            r"leave it out: --ignore 're:.*\.mlp\.shared_experts\..*'; or quantize symmetrically",
        )
    notes = tiles.kernel_notes("INT4", chosen, config, whole.group_size, request.readers)
    notes += tiles.ungated_notes("INT4", chosen, config, request.readers)
    before = stored_scheme(reference.config) if reference is not None else None
    if before is None or (before.group_size, before.symmetric) != (whole.group_size, whole.symmetric):
        advice = None
        if request.preset is None and before is None and whole.grid == "qmax7":
            less = "--search mse" if experts else "--asymmetric, or --search mse,"
            trained = "qmax7 is for weights that training rounds so (slime, Kimi K2)"
            advice = f"{trained}; for others {less} loses less: docs/quantize.md"
        return PackedWeights(whole, names, request.device, sglang_experts=special, notes=notes, advice=advice)
    kept_scales = before.kept_scales or before.grid != whole.grid
    return PackedWeights(whole, names, request.device, reference, special, kept_scales, notes)


def quantize_sample(weight: Tensor, scheme: QuantScheme) -> None:
    """As `SchemeModule.quantize_sample`."""
    quantize_pack([weight], scheme, ["a sample"])


def _reference(
    source: Checkpoint, scheme: QuantScheme, request: Request
) -> tuple[Checkpoint | None, Collection[str] | None]:
    """The checkpoint that gives scales, and the names of one that says what is packed."""
    stored = request.stored if request.stored is not None and stored_scheme(request.stored.config) else None
    reference = stored if request.like is None else request.like
    if request.preset:
        return reference, _names_for_rl(source)
    if request.like is not None:
        if stored_scheme(request.like.config) is None or not any(packed_in(request.like.specs)):
            declared = describe_quantization(request.like.config)
            raise CkptkitError(f"--like has no INT4 weights: {declared}", "give an INT4 checkpoint of the same model")
        return reference, request.like.specs
    return reference, None if stored is None else _packed_less(stored.specs, scheme.ignore)


def _names_for_rl(source: Checkpoint) -> dict[str, None]:
    """The names of an INT4 checkpoint that SGLang and vLLM can be updated with: only routed experts are packed.

    They are in the source's order, from which that of `ignore` follows: a set's would change with every process.
    SGLang cannot take other INT4 layers a second time, vLLM can; slime's training rounds nothing else. Raises
    CkptkitError where the model has no routed experts.
    """
    experts = class_tree(adapt_config(source.config, source.specs)).experts
    if not experts:
        raise CkptkitError(
            "--preset rl packs routed experts alone, since SGLang cannot be updated with other INT4 layers; this model "
            "has none",
            "serve it in BF16, or leave out the preset where the engine is vLLM, or is never updated",
        )
    packed = {f"{module}.weight" for module in experts}
    return dict.fromkeys(name.removesuffix(".weight") + PACKED if name in packed else name for name in source.specs)


def _packed_less(names: Collection[str], ignore: Sequence[str]) -> list[str]:
    """Replaces `N.weight_packed` by `N.weight` in these names for every module that an `ignore` entry covers."""
    spared = ignored((name.removesuffix(PACKED) for name in names if name.endswith(PACKED)), ignore)
    modules = [(name, name.removesuffix(PACKED)) for name in names]
    return [f"{module}.weight" if module != name and module in spared else name for name, module in modules]
