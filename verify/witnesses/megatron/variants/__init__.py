"""Architectures that Megatron's standard layer spec does not build: what each changes in the config and in the spec.

Only the processes of the witness import this package.
"""

from __future__ import annotations

from verify.witnesses.megatron.variants.dsa import DSA
from verify.witnesses.megatron.variants.full_qk_norm import FULL_QK_NORM
from verify.witnesses.megatron.variants.gated_delta_net import GATED_DELTA_NET
from verify.witnesses.megatron.variants.gemma3 import GEMMA3
from verify.witnesses.megatron.variants.gpt_oss import GPT_OSS
from verify.witnesses.megatron.variants.mamba import MAMBA
from verify.witnesses.megatron.variants.mla import MLA
from verify.witnesses.megatron.variants.sandwich import SANDWICH
from verify.witnesses.megatron.variants.variant import Variant
from verify.witnesses.megatron.variants.zero_centered_norm import ZERO_CENTERED_NORM

VARIANTS: tuple[Variant, ...] = (
    *(FULL_QK_NORM, MLA, GATED_DELTA_NET, MAMBA, ZERO_CENTERED_NORM, DSA, SANDWICH, GEMMA3, GPT_OSS),
)
