"""Megatron's torch_dist format: its names, reading it and writing it."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.storage", "ckptkit.formats")
