"""Jobs for transformers, and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.core.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

Ids = Sequence[Sequence[int]]  # token ids, one sequence a prompt
TOP = 20  # log-probabilities compared at each position, in addition to the prompt's own


@dataclass(frozen=True)
class Judged:
    """A model's log-probabilities (natural logarithms) for a prompt of n tokens."""

    tokens: Sequence[float]  # of tokens 1 to n-1
    top_ids: Sequence[Sequence[int]]  # the most probable tokens at each of these positions
    top: Sequence[Sequence[float]]  # log-probabilities at each position, of TOP tokens


def judged_logits(logits: Tensor, prompt: Sequence[int], top_ids: Ids | None = None) -> Judged:
    """The log-probabilities of a prompt, the best tokens, and those of `top_ids`, from its logits [tokens, vocabulary].

    Without `top_ids` (a list for each position but the first) the third are those of the best tokens themselves.
    """
    import torch

    normal = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    tokens = torch.tensor(prompt[1:], device=normal.device)
    wanted = None if top_ids is None else torch.tensor(top_ids, device=normal.device)
    count = TOP if wanted is None else wanted.shape[1]
    own = normal.topk(min(count, normal.shape[1])).indices
    top = normal.gather(1, own if wanted is None else wanted)
    return Judged(normal.gather(1, tokens[:, None])[:, 0].tolist(), own.tolist(), top.tolist())


@dataclass(frozen=True)
class ReferenceJob:
    checkpoint: Path
    report: str = ""
    prompts: Ids = ()
    top_ids: Sequence[Ids] = ()  # tokens to judge at each prompt and position but the first
    hf: Path | None = None  # has the config of a Megatron checkpoint without one
    dtype: str | None = None  # of the rounded pass, if not an engine's
    texts: Ids | None = None  # to be predicted
    activations: int | None = None  # the result of `activations.group_of`
    temperatures: Sequence[float] | None = None  # of each prompt, if not 1


@dataclass(frozen=True)
class Predicted:
    losses: Sequence[float]  # for each text, the sum of -ln p over its tokens but the first
    structure: float  # of the median matrix (see `prediction.py`): trained weights have more


@dataclass(frozen=True)
class Reference:
    """transformers' answers to each prompt; `top_ids` are its own most probable tokens."""

    dtype: str  # of `rounded`, and other rounding there
    exact: Sequence[Judged]  # in float32
    rounded: Sequence[Judged]
    predicted: Predicted | None = None  # of the job's texts


@dataclass(frozen=True)
class NamesJob:
    config: Mapping[str, Any]  # config.json, without a quantization_config
    tensors: Sequence[TensorSpec]
    report: str = ""
    adapter: Mapping[str, Any] = field(default_factory=dict)  # adapter_config.json, for PEFT


@dataclass(frozen=True)
class OtherShape:
    name: str  # as the class calls it
    stored: Sequence[int]
    built: Sequence[int]


@dataclass(frozen=True)
class NamesReport:
    model_class: str = ""  # empty if transformers has no class for this config
    missing: Sequence[str] = ()  # names in the class
    unexpected: Sequence[str] = ()
    other_shapes: Sequence[OtherShape] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # of weights made of several tensors
    refused: str = ""  # its message about a config from which it builds no class
    own: Sequence[str] = ()  # all weights of the class
    integers: Sequence[str] = ()  # the integer weights of the class
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)  # `names._aliases`
    # A class of the same config that has these tensors, if this one lacks most (for an adapter: some) of them.
    fits: str = ""
    unmatched: Sequence[str] = ()  # fields and keys of adapter_config.json without a module
