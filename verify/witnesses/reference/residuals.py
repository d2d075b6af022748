"""The stages of a decoder at which Megatron is compared with transformers, and how far apart both are at each.

A stage is a point of the residual stream, named for what was added last: after the embedding, after each layer's
attention and MLP, then after the final norm and the output layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

EMBEDDING, FINAL_NORM, OUTPUT = "the embedding", "the final norm", "the output layer"


def attention(layer: int) -> str:
    """The stage after a layer's attention; layers count from 0."""
    return f"the attention of layer {layer}"


def mlp(layer: int) -> str:
    """The stage after a layer's MLP or experts, which is the layer's output."""
    return f"the MLP of layer {layer}"


def whole(layer: int) -> str:
    """A layer's output where nothing within the layer is seen."""
    return f"layer {layer}"


# lab/benchmarks.md has what sound and faulty models measure.
FURTHEST = 10.0  # times the noise: sound parts stay below 3 in float32, and below 6 in bfloat16
FEW = 0.01  # of the tokens: near ties between experts send some elsewhere, by rounding alone
UNLUCKY = 3.0  # times as many tokens as rounding sends elsewhere in transformers


@dataclass(frozen=True)
class Stage:
    """What Megatron computes at a stage against what transformers computes there from Megatron's own previous stage.

    So no difference of an earlier layer counts here. Of both there is a number for every token of all prompts.
    """

    name: str
    apart: Sequence[float]  # the largest absolute difference from transformers in the more exact dtype
    # The same of transformers in the dtype that Megatron computes in; at least half the spacing of its numbers there.
    noise: Sequence[float]

    @property
    def differs(self) -> bool:
        """Whether more tokens are far apart than near ties between experts explain."""
        usual = median(self.noise)
        astray = sum(not far <= FURTHEST * max(near, usual) for far, near in zip(self.apart, self.noise, strict=True))
        rerouted = sum(near > FURTHEST * usual for near in self.noise)
        return astray > FEW * len(self.apart) + UNLUCKY * rerouted

    def __str__(self) -> str:
        return f"{self.name}, by up to {max(self.apart):.2g} where the noise is {max(self.noise):.2g}"
