"""What Megatron makes of a model: its arguments, pipelines, tensor-parallel cuts, module names and legacy files."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "converters.blocks",
    "converters.config",
    "converters.ops",
    "converters.planner",
    "converters.rules",
    "converters.stored",
)
