"""Megatron's layers computed once and reused, as long as nothing before or in them has changed."""

import re
from contextlib import ExitStack, contextmanager

from torch import Tensor

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_BEHIND = ("decoder.final_layernorm.", "decoder.final_norm.", "output_layer.", "mtp.")  # what no layer reads


def _number(name, layers):
    """The layer that a Megatron tensor belongs to, from 0; `layers` for what follows them, 0 for what precedes them."""
    if found := _LAYER.match(name):
        return int(found[1])
    return layers if name.startswith(_BEHIND) else 0


def untouched(names, layers):
    """How many layers, from the first on, compute the same whatever the values of these tensors are."""
    return min(_number(name, layers) for name in names)


def of_last_layer(tensors):
    """The tensors of the last layer that has any of them."""
    last = max(_number(name, 0) for name in tensors)
    return {name: tensor for name, tensor in tensors.items() if _number(name, 0) == last}


@contextmanager
def recorded_layers(layers):
    """A list that the layers' outputs, hidden states and context, are added to, in order."""
    outputs = []
    with ExitStack() as stack:
        for layer in layers:
            hook = layer.register_forward_hook(lambda _layer, _inputs, output: outputs.append(_copy(output)))
            stack.callback(hook.remove)
        yield outputs


@contextmanager
def reused_layers(layers, outputs):
    """Has the first layers return these outputs without computing them."""
    reused = list(zip(layers, outputs, strict=False))
    for layer, output in reused:
        layer.forward = lambda *_, _output=output, **_named: _copy(_output)
    try:
        yield
    finally:
        for layer, _ in reused:
            del layer.forward


def _copy(output):
    if isinstance(output, Tensor):
        return output.clone()
    hidden, context = output
    return hidden.clone(), context


@contextmanager
def replaced(held, tensors):
    """Has the places that hold a tensor hold another, whose vocabulary may be shorter than the padded one."""
    before = {name: [place.clone() for place in held[name]] for name in tensors}
    for name, tensor in tensors.items():
        for place in held[name]:
            place[: tensor.shape[0]].copy_(tensor)
    try:
        yield
    finally:
        for name, values in before.items():
            for place, value in zip(held[name], values, strict=True):
                place.copy_(value)
