"""What transformers computes at each stage of a decoder from the values that Megatron had at the stage before.

The parts are found by structure alone. The layers are the decoder's only list of as many modules as config.json says. A
layer has two children with matrices, and the one that is called second, on what a norm gave, is its MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from verify.witnesses.reference import residuals as stages
from verify.witnesses.reference.residuals import Stage

Values = Mapping[str, Tensor]  # by stage, [tokens, hidden size or vocabulary]


class Unseen(Exception):  # noqa: N818 - it says what cannot be seen of a model
    """Raised for a model whose stages no general rule finds; the message says what is not found."""


@dataclass(frozen=True)
class Decoder:
    """The decoder layers of a model, and its output layer."""

    layers: Sequence[nn.Module]
    head: nn.Module


def decoder_of(model: Any) -> Decoder:
    """The parts of one of transformers' models. Raises Unseen."""
    count = model.config.get_text_config().num_hidden_layers
    name = type(model).__name__
    lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    found = [child for child in lists if len(child) == count]
    if len(found) != 1:
        raise Unseen(f"transformers' {name} has {len(found)} lists of {count} modules in its decoder")
    head = model.get_output_embeddings()
    if head is None:
        raise Unseen(f"transformers' {name} names no output layer")
    return Decoder(list(found[0]), head)


def given_by(paths: Sequence[str], prompts: int) -> Sequence[Values]:
    """What Megatron's ranks wrote down, together: a mapping for each prompt. See `saved`."""
    found: list[dict[str, Tensor]] = [{} for _ in range(prompts)]
    for path in paths:
        for key, tensor in load_file(path).items():
            number, _, stage = key.partition(".")
            found[int(number)][stage] = tensor
    return found


def saved(values: Sequence[Values]) -> dict[str, Tensor]:
    """Tensors of a safetensors file, called NUMBER.STAGE after the number of the prompt, from 0."""
    return {f"{number}.{stage}": tensor for number, one in enumerate(values) for stage, tensor in one.items()}


def guided(model: nn.Module, decoder: Decoder, prompt: Sequence[int], given: Values) -> dict[str, Tensor]:
    """Runs a prompt with the model, every stage on `given` values of the one before, and says what it made of them.

    What a layer's MLP is given is what the model itself had after the attention. A stage that is not seen is left out.
    """
    found: dict[str, Tensor] = {}

    def swap(stage: str, hidden: Tensor) -> Tensor:
        found[stage] = hidden[0].clone()
        return given[stage][None].to(hidden) if stage in given else hidden

    with ExitStack() as stack:
        for hook in _hooks(decoder, swap, found):
            stack.callback(hook.remove)
        with torch.no_grad():
            tokens = torch.tensor([prompt], device=next(model.parameters()).device)
            found[stages.OUTPUT] = model(input_ids=tokens, use_cache=False).logits[0]
    return found


def _hooks(decoder: Decoder, swap: Callable[[str, Tensor], Tensor], found: dict[str, Tensor]) -> Iterator[Any]:
    yield decoder.layers[0].register_forward_pre_hook(_swap_input(swap, stages.EMBEDDING), with_kwargs=True)
    for number, layer in enumerate(decoder.layers):
        yield from _Middle(found, stages.attention(number)).hooks(layer)
        yield layer.register_forward_hook(_swap_output(swap, stages.mlp(number)))
    yield decoder.head.register_forward_pre_hook(_swap_input(swap, stages.FINAL_NORM), with_kwargs=True)


def _swap_input(swap: Callable[[str, Tensor], Tensor], stage: str) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if args:
            return (swap(stage, args[0]), *args[1:]), named
        return args, named | {"hidden_states": swap(stage, named["hidden_states"])}

    return hook


def _swap_output(swap: Callable[[str, Tensor], Tensor], stage: str) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return swap(stage, output) if isinstance(output, Tensor) else (swap(stage, output[0]), *output[1:])

    return hook


@dataclass
class _Middle:
    """Finds the residual stream between the attention and the MLP of a layer while it runs."""

    found: dict[str, Tensor]
    stage: str
    calls: int = 0
    normed: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # inputs and outputs of norms

    def hooks(self, layer: nn.Module) -> Iterator[Any]:
        """Hooks of the layer's children: those with matrices, and the others, which are norms."""
        children = list(layer.children())
        parts = [child for child in children if any(parameter.dim() > 1 for parameter in child.parameters())]
        if len(parts) != 2:
            return
        yield layer.register_forward_pre_hook(self._start)
        for child in children:
            if child in parts:
                yield child.register_forward_pre_hook(self._part, with_kwargs=True)
            else:
                yield child.register_forward_hook(self._norm)

    def _start(self, layer: nn.Module, args: Any) -> None:
        self.calls = 0
        self.normed.clear()

    def _norm(self, norm: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(output, Tensor):
            self.normed.append((args[0], output))

    def _part(self, part: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        self.calls += 1
        first = next((value for value in (*args, *named.values()) if isinstance(value, Tensor)), None)
        into = next((into for into, output in self.normed if output is first), None)
        if self.calls == 2 and into is not None:
            self.found[self.stage] = into[0].clone()


def compare(
    given: Sequence[Values], exact: Sequence[Values], rounded: Sequence[Values], dtype: torch.dtype
) -> list[Stage]:
    """Every stage that both programs show, in the model's order; each argument has a mapping for every prompt.

    `rounded` was computed in `dtype`, as the values that were given.
    """
    common = [stage for stage in exact[0] if stage in given[0]]
    undivided = {
        stages.mlp(layer): stages.whole(layer) for layer in range(len(common)) if stages.attention(layer) not in common
    }
    found = []
    for stage in common:
        far, near = [], []
        for one, sharp, rough in zip(given, exact, rounded, strict=True):
            right = sharp[stage].double()
            far.append(_largest(one[stage].to(right) - right))
            near.append(torch.maximum(_largest(rough[stage] - right), _largest(right) * torch.finfo(dtype).eps / 2))
        found.append(Stage(undivided.get(stage, stage), torch.cat(far).tolist(), torch.cat(near).tolist()))
    return found


def _largest(tensor: Tensor) -> Tensor:
    return tensor.abs().amax(-1)
