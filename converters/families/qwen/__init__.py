"""Qwen 2 to 3.6, dense, mixtures of experts, hybrids, and their vision models."""

MAY_IMPORT = ("ckptkit.core", "converters.blocks", "converters.config", "converters.family", "converters.rules")
