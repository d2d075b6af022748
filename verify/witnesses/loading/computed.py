"""What engines compute of a tensor while they load it, where they do not keep a copy."""

from __future__ import annotations

import torch
from torch import Tensor


def computed_of(name: str, tensor: Tensor) -> Tensor | None:
    """What an engine holds for a tensor, in float32; None for one that it copies.

    Of a Mamba mixer's `A_log` that is A = -exp(A_log). Source: SGLang `layers/attention/mamba/mamba.py` and vLLM
    `layers/mamba/mamba_mixer2.py`, `composed_weight_loader`.
    """
    return -torch.exp(tensor.float()) if name.endswith((".mixer.A_log", ".mamba.A_log")) else None


def is_computed(held: Tensor, expected: Tensor) -> bool:
    """Whether a parameter holds these values, within what one exponential of another device may be off."""
    return torch.allclose(held.float(), expected.to(held.device), rtol=1e-6, atol=0)
