"""HF <-> Megatron mappings: one declarative file a model family, and the planner that expands them."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.storage", "ckptkit.formats", "quant.patterns")
