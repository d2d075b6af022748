"""DeepSeek V3 and the models that are built as it: Moonlight, Kimi."""

MAY_IMPORT = ("ckptkit.core", "converters.blocks", "converters.config", "converters.family", "converters.rules")
