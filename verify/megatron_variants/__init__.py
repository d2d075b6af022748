"""Architectures that Megatron's standard layer spec does not build: what each changes in the config and in the spec.

Only the processes of the witness import this package.
"""

from __future__ import annotations

from verify.megatron_variants.variant import Variant

VARIANTS: tuple[Variant, ...] = ()
