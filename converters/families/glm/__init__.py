"""GLM-4 to GLM-5."""

MAY_IMPORT = (
    "ckptkit.core",
    "converters.blocks",
    "converters.config",
    "converters.families.deepseek",
    "converters.family",
    "converters.ops",
    "converters.rules",
)
