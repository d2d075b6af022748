"""What logits say of a prompt: the same numbers from transformers, Megatron and, as it reports them itself, SGLang."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verify.witnesses.reference.job import TOP, Ids, Judged


def judged(logits: Tensor, prompt: Sequence[int], top_ids: Ids | None = None) -> Judged:
    """Of logits [tokens, vocabulary] of a prompt: its log-probabilities, the best tokens, and those of `top_ids`.

    Without `top_ids`, one list for each position but the first, those of the best tokens themselves.
    """
    normal = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    tokens = torch.tensor(prompt[1:], device=normal.device)
    wanted = None if top_ids is None else torch.tensor(top_ids, device=normal.device)
    count = TOP if wanted is None else wanted.shape[1]
    own = normal.topk(min(count, normal.shape[1])).indices
    top = normal.gather(1, own if wanted is None else wanted)
    return Judged(normal.gather(1, tokens[:, None])[:, 0].tolist(), own.tolist(), top.tolist())
