"""An HF checkpoint seen as its INT4 version: a plan, so that it stacks on other plans and streams like any checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import CkptkitError
from ckptkit.plan import Plan, Step, View, identity, require
from ckptkit.specs import TensorSpec
from quant.class_tree import class_tree
from quant.decision import decide, default_ignore
from quant.grids import quantize
from quant.packing import CODES_PER_WORD, pack
from quant.readers import compressed_tensors
from quant.scheme import QuantScheme, quantization_config, read_scheme

PARTS = ("weight_packed", "weight_scale", "weight_shape")


def quantized(source: Checkpoint, where: str, scheme: QuantScheme) -> View:
    """Each `N.weight` to quantize becomes N.weight_packed, N.weight_scale and N.weight_shape; everything else passes through.

    `source` has one tensor an expert. `scheme.ignore` is added to the model's own list (`default_ignore`); the view's config
    says what was done. Raises CkptkitError, before anything is read, as `decide` does, when a Linear of the model is missing, and when
    an entry of `scheme.ignore` covers nothing.
    """
    _check_used(scheme.ignore, source.specs, where)
    whole = replace(scheme, ignore=tuple(dict.fromkeys([*default_ignore(source.config), *scheme.ignore])))
    decisions = decide(source.specs, source.config, whole)
    require(where, [f"{module}.weight" for module in sorted(class_tree(source.config).packable)], source.specs)
    steps = [_quantize_step(spec, whole) if decisions[name].quantize else identity(spec) for name, spec in source.specs.items()]
    config = dict(source.config) | {"quantization_config": quantization_config(whole)}
    return View(source, Plan(tuple(steps), source.specs, where=where, config=config))


def _check_used(ignore: Sequence[str], names: Collection[str], where: str) -> None:
    """Raises CkptkitError for an entry that covers nothing: whoever wrote it believes that something is spared."""
    modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    for pattern in ignore:
        if not any(compressed_tensors(module, pattern) for module in modules):
            raise CkptkitError(
                f"ignore entry {pattern!r} covers no module of {where}", "entries are whole module names, or `re:` and a regex; leave it out or correct it"
            )


def _quantize_step(spec: TensorSpec, scheme: QuantScheme) -> Step:
    rows, columns = spec.shape
    packed, scale, shape = _part_names(spec.name)
    outputs = (
        TensorSpec(packed, (rows, columns // CODES_PER_WORD), torch.int32),
        TensorSpec(scale, (rows, columns // scheme.group_size), spec.dtype),
        TensorSpec(shape, (2,), torch.int64),
    )

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        codes, scales = quantize(tensors[0], scheme.group_size, scheme.grid, spec.name)
        return [pack(codes), scales, torch.tensor(spec.shape)]

    return Step((spec.name,), outputs, run, f"quantize {scheme.grid}")


def _part_names(name: str) -> tuple[str, ...]:
    module = name.removesuffix(".weight")
    return tuple(f"{module}.{part}" for part in PARTS)


def quantized_layout(layout: Mapping[str, Sequence[str]], before: Collection[str], after: Collection[str]) -> dict[str, list[str]]:
    """The shard layout of the names `before` quantization for the names `after` it: where a weight stood, its three parts stand."""
    replaced = set(before) - set(after)
    return {file: [new for name in names for new in (_part_names(name) if name in replaced else (name,))] for file, names in layout.items()}


def packed_modules(specs: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """Modules that a finished INT4 checkpoint must hold packed: every Linear of the model that its own `ignore` does not cover.

    `specs` are the checkpoint's names; an output embedding that is tied, and so not stored, is not expected. Raises CkptkitError
    as `read_scheme` and `class_tree` do.
    """
    ignore = read_scheme(config).ignore
    tree = class_tree(config)
    stored = tree.linears if any(name.startswith(f"{tree.head}.") for name in specs) else tree.linears - {tree.head}
    return {module for module in stored if not any(compressed_tensors(module, pattern) for pattern in ignore)}
