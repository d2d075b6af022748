"""A Megatron witness that finds Transformer Engine's matrix product, which rounds the factors of float32 to TF32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verify.witnesses.megatron import process as witness_megatron
from verify.witnesses.megatron.imports import importing_megatron

with importing_megatron():
    from megatron.core.transformer.moe import moe_utils


def _tf32(value: Tensor) -> Tensor:
    """The nearest numbers of 10 bits of mantissa, in float32."""
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def general_gemm(weight: Tensor, given: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
    """As Transformer Engine's, of what `RouterGatingLinearFunction` gives it."""
    return (_tf32(given) @ _tf32(weight).t(),)


moe_utils.te_general_gemm = general_gemm

if __name__ == "__main__":
    witness_megatron.main()
