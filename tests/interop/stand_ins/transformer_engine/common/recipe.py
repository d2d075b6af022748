"""Recipes of FP8, which megatron-core names when it is imported."""


class Recipe:
    """Any recipe."""


class DelayedScaling(Recipe):
    """Scales taken from earlier steps."""
