"""What transformers is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.core.specs import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

Ids = Sequence[Sequence[int]]  # of tokens, a sequence a prompt
TOP = 20  # tokens a position whose log-probabilities are compared, besides the prompt's own


@dataclass(frozen=True)
class Judged:
    """What a model makes of a prompt of n tokens; log-probabilities are natural logarithms."""

    tokens: Sequence[float]  # of tokens 1 to n-1
    top_ids: Sequence[Sequence[int]]  # the most probable tokens at each of these positions
    top: Sequence[Sequence[float]]  # log-probabilities, as many a position


def judged_logits(logits: Tensor, prompt: Sequence[int], top_ids: Ids | None = None) -> Judged:
    """Of logits [tokens, vocabulary] of a prompt: its log-probabilities, the best tokens, and those of `top_ids`.

    The same numbers from transformers and Megatron. Without `top_ids`, one list for each position but the first, those
    of the best tokens themselves.
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
    """What transformers is asked to compute with a checkpoint."""

    checkpoint: Path
    report: str = ""
    prompts: Ids = ()
    top_ids: Sequence[Ids] = ()  # for each prompt and position but the first: tokens whose log-probability is wanted
    hf: Path | None = None  # gives the config of a Megatron checkpoint that carries none
    dtype: str | None = None  # of the rounded pass; None: the one in which an engine computes
    texts: Ids | None = None  # to be predicted
    activations: int | None = None  # `activations.group_of` what the engine rounds; None: nothing
    temperatures: Sequence[float] | None = None  # of each prompt; None: 1


@dataclass(frozen=True)
class Predicted:
    """How well a model predicts fixed texts."""

    losses: Sequence[float]  # of each text, the sum of -ln p over its tokens but the first
    structure: float  # of the median matrix (see `prediction.py`): trained weights have more


@dataclass(frozen=True)
class Reference:
    """What transformers makes of each prompt; `top_ids` are its own most probable tokens."""

    dtype: str  # of `rounded`, and what else is rounded there
    exact: Sequence[Judged]  # in float32
    rounded: Sequence[Judged]
    predicted: Predicted | None = None  # of the job's texts


@dataclass(frozen=True)
class NamesJob:
    """Asks transformers which tensors its class misses, does not know, or has in another shape."""

    config: Mapping[str, Any]  # config.json, without a quantization_config
    tensors: Sequence[TensorSpec]
    report: str = ""
    adapter: Mapping[str, Any] = field(default_factory=dict)  # adapter_config.json, whose tensors PEFT is asked about


@dataclass(frozen=True)
class OtherShape:
    """A tensor that transformers' class has in another shape."""

    name: str  # as the class calls it
    stored: Sequence[int]
    built: Sequence[int]


@dataclass(frozen=True)
class NamesReport:
    """What transformers made of a `NamesJob`."""

    model_class: str = ""  # empty: transformers has no class for this config
    missing: Sequence[str] = ()  # as the class calls them
    unexpected: Sequence[str] = ()
    other_shapes: Sequence[OtherShape] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # of weights that several tensors become
    refused: str = ""  # what it says of a config from which it builds no class
    own: Sequence[str] = ()  # all weights of the class
    integers: Sequence[str] = ()  # those of them that are whole numbers
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)  # `names._aliases`
    # A class of the same config that has these tensors, where this one has hardly any; of an adapter: not all.
    fits: str = ""
    unmatched: Sequence[str] = ()  # fields and keys of adapter_config.json that name no module
