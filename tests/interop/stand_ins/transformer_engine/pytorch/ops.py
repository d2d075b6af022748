"""Fused operations, which are not used: megatron-core names these two in annotations."""


class FusibleOperation:
    """One operation."""


class Sequential:
    """Several operations in a row."""
