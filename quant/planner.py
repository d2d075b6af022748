"""Quantizes an HF checkpoint to INT4 by a plan, which stacks on other plans and streams like any checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import dtype_name
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, Step, View, identity, require
from ckptkit.core.specs import TensorSpec
from converters.registry import family_of
from converters.stored import as_stored
from quant.formats.packing import CODES_PER_WORD
from quant.formats.part_names import PACKED, SCALE, SHAPE, ZERO_POINT, packed_in
from quant.formats.scheme import QuantScheme, quantization_config, read_scheme
from quant.formats.zero_points import check_zero_point_layout, for_sglang_experts, is_expert
from quant.kernels.dispatch import quantize_pack
from quant.requantize import requantize, stored_parts, stored_scheme
from quant.selection import tiles
from quant.selection.class_tree import class_tree
from quant.selection.decision import default_ignore, resolve
from quant.selection.fused_experts import refuse_for_transformers
from quant.selection.readers import ALL_READERS, compressed_tensors


def quantized(
    source: Checkpoint,
    where: str,
    scheme: QuantScheme,
    *,
    reference: Checkpoint | None = None,
    like: Collection[str] | None = None,
    tp: int | None = None,
    readers: Sequence[str] = ALL_READERS,
    device: str = "cpu",
) -> View:
    """Quantizes a checkpoint to INT4; tensors that are not quantized pass through.

    `N.weight` becomes `N.weight_packed`, `N.weight_scale`, `N.weight_shape` and, if asymmetric, `N.weight_zero_point`.
    `source` has one tensor per expert. `scheme.ignore` is added to the model's own list (`default_ignore`).
    The result's config records the scheme. `reference`: an INT4 checkpoint; if its groups are the same, its scales are
    kept where they still give the weights.
    `like`: the names of an INT4 checkpoint of the same model; exactly what it has packed is packed.
    `readers` (as `--reader`) must agree on what is packed. `tp`: a tensor parallel size at which SGLang's kernels
    must be able to load it. `device`: "cpu" or "cuda", with the same bytes from both.

    Raises CkptkitError, before anything is read, as `resolve` does, and when a Linear of the model is missing, an entry
    of `scheme.ignore` covers nothing, there is no such device, or transformers was chosen as a reader and cannot load
    the packed experts.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise CkptkitError(f"torch finds no GPU for --device {device}", "leave it out: on a CPU the bytes are the same")
    _check_used(scheme.ignore, source.specs, where)
    config = as_stored(source.config, source.specs)
    whole = replace(scheme, ignore=tuple(dict.fromkeys([*default_ignore(config, like), *scheme.ignore])))
    verdicts = resolve(source.specs, config, whole, like=like, tp=tp, readers=readers)
    require(where, [f"{module}.weight" for module in sorted(class_tree(config).packable)], source.specs)
    experts = any(verdict.quantize and is_expert(name) for name, verdict in verdicts.items())
    if experts:
        refuse_for_transformers(config, where, readers)
    before = stored_scheme(reference.config) if reference is not None else None
    keeps = reference if before is not None and before.fits(whole) else None
    special = check_zero_point_layout(whole, experts, readers)
    if special and family_of(config).engine("sglang").joins_shared_expert:
        _check_joined([name for name, verdict in verdicts.items() if verdict.quantize and ".shared_experts." in name])
    steps = [
        quantize_step(spec, whole, keeps, special, device) if verdicts[name].quantize else identity(spec)
        for name, spec in source.specs.items()
    ]
    others = keeps is not None and before is not None and before.has_others(whole)
    content = quantization_config(whole, sglang_experts=special, kept_scales=others)
    written = dict(source.config) | {"quantization_config": content}
    return View(source, Plan(tuple(steps), source.specs, where=where, config=written))


def kernel_notes(source: Checkpoint, view: Checkpoint, scheme: QuantScheme, readers: Sequence[str]) -> list[str]:
    """What to know before `view`, the `source` quantized, is served with SGLang: layers that none of its kernels runs.

    Nothing where SGLang is not among `readers`.
    """
    if "sglang" not in readers:
        return []
    packed = set(packed_in(view.specs))
    chosen = [spec for name, spec in source.specs.items() if name.removesuffix(".weight") in packed]
    config = as_stored(source.config, source.specs)
    fault = tiles.unrunnable(chosen, class_tree(config), config, scheme.group_size)
    if fault is None:
        return []
    hint, details = fault
    return [f"no INT4 kernel of SGLang runs {'; '.join(details)}: an engine would end at its first prompt; {hint}"]


def rl_names(source: Checkpoint) -> dict[str, None]:
    """The names of an INT4 checkpoint that an RL engine can be updated with: only routed experts are packed.

    They are in the source's order, from which that of `ignore` follows: a set's would change with every process.
    SGLang cannot take other INT4 layers a second time, and slime's training rounds nothing else. Raises CkptkitError
    where the model has no routed experts.
    """
    experts = class_tree(as_stored(source.config, source.specs)).experts
    if not experts:
        raise CkptkitError(
            "--preset rl packs routed experts alone, since SGLang cannot be updated with other INT4 layers; this model "
            "has none",
            "serve it in BF16, or leave out the preset where the engine is never updated",
        )
    packed = {f"{module}.weight" for module in experts}
    return dict.fromkeys(name.removesuffix(".weight") + PACKED if name in packed else name for name in source.specs)


def _check_joined(packed: Sequence[str]) -> None:
    """Raises CkptkitError for a packed shared expert that SGLang keeps among the routed ones."""
    if packed:
        raise CkptkitError(
            f"{packed[0]}: SGLang keeps a packed shared expert among the routed ones, and cannot take its zero points",
            r"leave it out: --ignore 're:.*\.mlp\.shared_experts\..*'; or quantize symmetrically",
        )


def _check_used(ignore: Sequence[str], names: Collection[str], where: str) -> None:
    """Raises CkptkitError for an entry that covers nothing: its author believes that it spares a module."""
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    for pattern in ignore:
        if not any(compressed_tensors(module, pattern) for module in modules):
            raise CkptkitError(
                f"ignore entry '{pattern}' covers no module of {where}",
                "entries are whole module names, or `re:` and a regex; leave it out or correct it",
            )


def quantize_step(
    spec: TensorSpec,
    scheme: QuantScheme,
    reference: Checkpoint | None = None,
    sglang_experts: bool = False,
    device: str = "cpu",
) -> Step:
    """Returns the step that quantizes a weight to its packed parts.

    `reference`: an INT4 checkpoint with the same groups, whose scales are kept where they still give the weight.
    `sglang_experts`: zero points of routed experts are stored in SGLang's layout (`quant.formats.zero_points`).
    """
    rows, columns = spec.shape
    groups, special = scheme.groups(columns), sglang_experts and is_expert(spec.name)
    packed, scale, shape, zero_point = _part_names(spec.name)
    stored = reference.specs.get(scale) if reference is not None else None
    dtype = dtype_name(scheme.scale_dtype) if scheme.scale_dtype else (stored or spec).dtype
    outputs = [
        TensorSpec(packed, (rows, columns // CODES_PER_WORD), "int32"),
        TensorSpec(scale, (rows, groups), dtype),
        TensorSpec(shape, (2,), "int64"),
    ]
    if not scheme.symmetric:
        across = -(-rows // CODES_PER_WORD)
        outputs.append(TensorSpec(zero_point, (groups, across) if special else (across, groups), "int32"))

    # No closure: a large model has 70,000 of these steps, and a closure holds a cell for each variable.
    run = partial(_parts, spec, scheme, reference, special, device)
    return Step((spec.name,), tuple(outputs), run, f"quantize {scheme.grid}")


def _parts(
    spec: TensorSpec,
    scheme: QuantScheme,
    reference: Checkpoint | None,
    special: bool,
    device: str,
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Quantizes a weight to the parts that `quantize_step` announces."""
    before = (
        stored_parts(reference, spec.name.removesuffix(".weight"), scheme.symmetric) if reference is not None else None
    )
    weight = tensors[0].to(device)
    one = (
        requantize(weight, before, scheme, spec.name)
        if before is not None
        else quantize_pack([weight], scheme, [spec.name])[0]
    )
    parts = [one.words, one.scale, torch.tensor(spec.shape)]
    if one.zero_point is not None:
        parts.append(for_sglang_experts(one.zero_point, spec.shape[0], spec.name) if special else one.zero_point)
    return [part.cpu() for part in parts]


def _part_names(name: str) -> tuple[str, ...]:
    return tuple(name.removesuffix(".weight") + part for part in (PACKED, SCALE, SHAPE, ZERO_POINT))


def quantized_layout(
    layout: Mapping[str, Sequence[str]], before: Collection[str], after: Collection[str]
) -> dict[str, list[str]]:
    """Returns the shard layout after quantization, with each weight's parts in its place."""
    replaced = set(before) - set(after)
    made = {name: [part for part in _part_names(name) if part in after] for name in replaced}
    return {file: [new for name in names for new in made.get(name, [name])] for file, names in layout.items()}


def packed_less(names: Collection[str], ignore: Sequence[str]) -> list[str]:
    """Replaces `N.weight_packed` by `N.weight` in these names for every module that an `ignore` entry covers."""
    less = []
    for name in names:
        module = name.removesuffix(PACKED)
        spared = module != name and any(compressed_tensors(module, pattern) for pattern in ignore)
        less.append(f"{module}.weight" if spared else name)
    return less


def packed_modules(specs: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """Returns the modules that an INT4 checkpoint must hold packed: every Linear that its `ignore` does not cover.

    `specs`: the checkpoint's names. A tied output embedding, which is not stored, is not expected.
    Raises CkptkitError as `read_scheme` and `class_tree` do.
    """
    ignore = read_scheme(config).ignore
    tree = class_tree(config)
    stored = tree.linears if any(name.startswith(f"{tree.head}.") for name in specs) else tree.linears - {tree.head}
    return {module for module in stored if not any(compressed_tensors(module, pattern) for pattern in ignore)}
