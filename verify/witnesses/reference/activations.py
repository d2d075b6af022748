"""Rounds the inputs of FP8 layers as an engine does, to measure the noise of the format."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.skip import CannotCheck

if TYPE_CHECKING:
    from torch import Tensor, nn

_LARGEST = 448.0  # of float8_e4m3fn
_IN_LAYERS = re.compile(r"\blayers\..+")
_METHODS = ("fp8", "mxfp8", "modelopt", "modelopt_fp4")


def rounds_activations(quantization: Mapping[str, Any]) -> bool:
    """Whether SGLang quantizes a layer's inputs as well as its weights."""
    return quantization.get("quant_method") in _METHODS or bool(_group_inputs(quantization))


def group_of(quantization: Mapping[str, Any]) -> int | None:
    """The number of a layer's inputs that share a scale in FP8, 0 for all of a token, or None if SGLang rounds none.

    A scale is the largest magnitude / 448, in float32: SGLang 0.5.16 `fp8_kernel.py`,
    `sglang_per_token_group_quant_fp8` and `scaled_fp8_quant`. Raises CannotCheck for every other rounding.
    """
    if not rounds_activations(quantization):
        return None
    if quantization.get("quant_method") == "fp8" and quantization.get("activation_scheme", "dynamic") == "dynamic":
        block = quantization.get("weight_block_size")
        return int(block[1]) if block else 0
    known = {"type": "float", "num_bits": 8, "dynamic": True, "symmetric": True}
    inputs = _group_inputs(quantization)
    sizes = {int(one.get("group_size") or 0) for one in inputs}
    if len(sizes) == 1 and all(known.items() <= one.items() and one.get("strategy") != "tensor" for one in inputs):
        return sizes.pop()
    raise CannotCheck("SGLang rounds activations of this format too, and ckptkit does not know how much that changes")


def _group_inputs(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = dict(quantization.get("config_groups") or {}).values()
    return [inputs for one in groups if (inputs := one.get("input_activations"))]


@contextmanager
def rounded_inputs(model: nn.Module, modules: Collection[str], group: int) -> Iterator[None]:
    """Has the model's layers of these names round inputs, `group` values together. Raises CkptkitError without any."""
    # Experts that transformers keeps in one module round the inputs of all of them, not those of their second product.
    wanted = {_name(module) for module in modules}
    wanted |= {f"{before}experts" for before, experts, _ in (one.partition("experts.") for one in wanted) if experts}
    with ExitStack() as stack:
        layers = [module for name, module in model.named_modules() if _name(name) in wanted]
        for module in layers:
            stack.callback(module.register_forward_pre_hook(partial(_round, group), with_kwargs=True).remove)
        if not layers:
            raise CkptkitError("transformers builds none of the modules that are stored in FP8", "leave out --logits")
        yield


def _name(module: str) -> str:
    """The name from its layer on; its prefix differs if a model is part of another."""
    suffix = _IN_LAYERS.search(module)
    return suffix[0] if suffix else module


def _round(group: int, module: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, Any]:
    """Rounds only the first tensor: a router's choices follow."""
    if args:
        return (rounded(args[0], group), *args[1:]), named
    first, *_ = named
    return args, {**named, first: rounded(named[first], group)}


def rounded(inputs: Tensor, group: int) -> Tensor:
    """Rounds [..., size] to float8_e4m3fn and back. A scale is for `group` values along the last axis, or 0 for all."""
    import torch

    size = inputs.shape[-1]
    width = group or size
    parts = torch.nn.functional.pad(inputs.float(), (0, -size % width)).reshape(*inputs.shape[:-1], -1, width)
    scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / _LARGEST
    codes = (parts / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    result: Tensor = (codes.float() * scales).flatten(-2)[..., :size].to(inputs.dtype)
    return result
