"""Layers that are one block each, as a layer pattern of Megatron's HybridModel says, and the Mamba-2 mixer.

Source: megatron-core 0.19 `models/hybrid/hybrid_layer_allocation.py` and `ssm/mamba_mixer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.core.errors import CkptkitError

# Letters of `--hybrid-layer-pattern`.
MIXER, ATTENTION, LATENT, SPARSE, LINEAR, DENSE, EXPERTS = "M", "*", "+", "D", "G", "-", "E"


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 mixer: its heads and their size, groups of heads that share B and C, state size, convolution kernel."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size <= 0:
                raise CkptkitError(
                    f"config.json: {name} of the Mamba mixer must be positive, not {size}",
                    "compare it with the release",
                )
        if self.heads % self.groups:
            raise CkptkitError(f"config.json: {self.heads} Mamba heads do not divide into {self.groups} groups")

    @property
    def inner(self) -> int:
        """Features inside the mixer."""
        return self.heads * self.head_dim

    @property
    def conv(self) -> tuple[int, int, int]:
        """Rows of x, B and C in the convolution."""
        return self.inner, self.groups * self.state, self.groups * self.state

    @property
    def in_proj(self) -> tuple[int, ...]:
        """Rows of z, x, B, C and dt in the input projection."""
        return self.inner, *self.conv, self.heads


def places(pattern: str, letter: str) -> tuple[int, ...]:
    """The layers of one kind, from 0."""
    return tuple(layer for layer, one in enumerate(pattern) if one == letter)
