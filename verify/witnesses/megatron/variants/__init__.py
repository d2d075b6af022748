"""Architectures that Megatron's standard layer spec does not build: what each changes in the config and in the spec.

Only the processes of the witness import this package.
"""

from __future__ import annotations

from ckptkit.verify.witnesses.megatron.variants.attention import DSA, FULL_QK_NORM, MLA
from ckptkit.verify.witnesses.megatron.variants.norms import SANDWICH, ZERO_CENTERED_NORM
from ckptkit.verify.witnesses.megatron.variants.recurrent import GATED_DELTA_NET, MAMBA
from ckptkit.verify.witnesses.megatron.variants.settings import GEMMA3, GPT_OSS
from ckptkit.verify.witnesses.megatron.variants.variant import Variant

VARIANTS: tuple[Variant, ...] = (
    *(FULL_QK_NORM, MLA, GATED_DELTA_NET, MAMBA, ZERO_CENTERED_NORM, DSA, SANDWICH, GEMMA3, GPT_OSS),
)
