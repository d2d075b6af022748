"""Models that no released Megatron has loaded: their HF side is whole, and Megatron's names are for those who ask.

Each says in `ModelFamily.unwitnessed` what megatron-core lacks.
"""

MAY_IMPORT = (
    "ckptkit.core",
    "converters.blocks",
    "converters.config",
    "converters.family",
    "converters.ops",
    "converters.rules",
)
