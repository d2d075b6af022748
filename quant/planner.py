"""Quantizes an HF checkpoint by a plan, which composes with other plans and streams like any checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ckptkit.converters.experts import only_fused
from ckptkit.converters.registry import FAMILIES
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.groups import find_refusals
from ckptkit.quant.ignore.matching import covering
from ckptkit.quant.ignore.readers import readers_of
from ckptkit.quant.schemes.interface import Request
from ckptkit.quant.schemes.registry import Packing, Scheme, scheme_module


def quantized(source: Checkpoint, scheme: Scheme, request: Request) -> tuple[View, Packing]:
    """Quantizes a checkpoint, and returns the selection too. Tensors that are not quantized pass through.

    The result's config records the scheme. Raises CkptkitError, before anything is read, as the scheme's `select` does,
    and for an entry of `ignore` that covers nothing or a missing device.
    """
    if request.device != "cpu":
        import torch  # only for a GPU

        if not torch.cuda.is_available():
            message = f"torch finds no GPU for --device {request.device}"
            raise CkptkitError(message, "remove --device: the CPU writes the same bytes")
    _check_used(scheme.ignore, source.specs, request.where)
    _check_loaded(source.config, scheme)
    packing = scheme_module(scheme.name).select(source, scheme, request)
    config = {**source.config, **engine_class("vllm", source.config).fp8_keys, "quantization_config": packing.config()}
    _check_refused(config, scheme, request)
    steps = tuple(_steps(source.specs, packing))
    return View(source, Plan(steps, source.specs, where=request.where, config=config)), packing


def _steps(specs: Mapping[str, TensorSpec], packing: Packing) -> Iterator[Step]:
    groups = {name: group for group in packing.together for name in group}
    for name, spec in specs.items():
        group = groups.get(name, (name,))
        if name not in packing.names:
            yield identity(spec)
        elif name == group[0]:
            yield quantize_step([specs[one] for one in group], packing)


def quantize_step(specs: Sequence[TensorSpec], packing: Packing) -> Step:
    """Returns the step that quantizes weights to their parts: the same number for each, one weight after the other."""
    # No closure: a large model has 70,000 of these steps, and a closure holds a cell for each variable.
    outputs = tuple(part for spec in specs for part in packing.shapes(spec))
    return Step(tuple(spec.name for spec in specs), outputs, partial(packing.pack, specs), packing.label)


def require_separate_experts(config: Mapping[str, Any], scheme: Scheme) -> None:
    """Raises CkptkitError for a model with experts that no reader knows one by one."""
    if only_fused(config):
        message = f"{scheme.title} {config['model_type']} is not supported: its experts are one tensor per layer, "
        message += "and no engine has names for single experts"
        hint = "serve the release: gate and up rows of its experts cannot be told apart"
        if config["model_type"] in FAMILIES:
            hint = "serve the release, or dequantize it with --scheme none: engines load experts with biases in MXFP4 "
            hint += "and BF16 (SGLang's block FP8 has biases too, but 128 does not divide gpt-oss's 2880 features)"
        raise CkptkitError(message, hint, code="unsupported")


def _check_loaded(config: Mapping[str, Any], scheme: Scheme) -> None:
    """Raises CkptkitError if this model's classes in engines load no checkpoint of the scheme."""
    is_loaded = scheme.name == "fp8-block" and "compressed-tensors" not in scheme.command_line()
    if engine_class("sglang", config).fp8_only and not is_loaded:
        raise CkptkitError(
            f"{scheme.title} {config['model_type']} is not supported: SGLang and vLLM load this model in BF16, "
            "in FP8 blocks with quant_method fp8, and with experts in MXFP4 or NVFP4 as published",
            "pass --scheme fp8-block",
            code="unsupported",
        )


def _check_refused(config: Mapping[str, Any], scheme: Scheme, request: Request) -> None:
    """Raises CkptkitError if one of the readers refuses the config of the result."""
    if config["quantization_config"].get("quant_method") != "compressed-tensors":
        return
    for refusal in find_refusals(config):
        if readers := [reader for reader in readers_of(request.readers) if reader in refusal.readers]:
            message = f"{' and '.join(readers)} would refuse {request.where} in {scheme.title}: {refusal.what}"
            raise CkptkitError(message, refusal.hint, code="unsupported")


def _check_used(ignore: Sequence[str], names: Collection[str], where: str) -> None:
    """Raises CkptkitError for an entry that covers nothing, since its author expects that it excludes a module."""
    covers = covering(ignore, [name.removesuffix(".weight") for name in names if name.endswith(".weight")])
    for pattern in ignore:
        if not covers(pattern):
            hint = "remove the entry, or write a full module name, or `re:` and a regex"
            raise CkptkitError(f"ignore entry '{pattern}' covers no module of {where}", hint)


def quantized_layout(layout: Mapping[str, Sequence[str]], view: View) -> dict[str, list[str]]:
    """The shard layout after quantization, with the parts of each weight instead of it."""
    made: dict[str, list[str]] = defaultdict(list)
    for name in view.specs:
        step = view.step(name)
        at = next(at for at, spec in enumerate(step.outputs) if spec.name == name)
        made[step.inputs[at * len(step.inputs) // len(step.outputs)]].append(name)
    return {file: [part for name in names for part in made[name]] for file, names in layout.items()}
