"""Computes with a transformers model in float64 that is loaded in float32, to learn the noise of float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _Float64Mode(TorchFunctionMode):
    """Computes in float64 what code asks for in float32: norms, softmax and routers do."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        named = {name: _as_float64(value) for name, value in (kwargs or {}).items()}
        return function(*map(_as_float64, args), **named)


def _as_float64(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64(model: Any, layers: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Has a float32 model compute in float64; afterwards it is what it was.

    Each of `layers` is float64 only while it runs, so that memory grows by the largest of them and by what is outside.
    Grouped matrix products, which know no float64, are computed expert by expert from then on.
    """
    model.set_experts_implementation("eager")
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(lambda layer, args: _cast(layer, torch.float64)).remove)
            stack.callback(layer.register_forward_hook(lambda layer, args, output: _cast(layer, torch.float32)).remove)
        for module in model.modules():
            if not inside & {id(parameter) for parameter in module.parameters()}:
                _cast(module, torch.float64)
        stack.callback(_cast, model, torch.float32)
        stack.enter_context(_Float64Mode())
        yield


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    with torch._C.DisableTorchFunction():  # our own casts are not code of the model
        module.to(dtype)
