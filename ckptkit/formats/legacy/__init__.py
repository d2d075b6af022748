"""Megatron's legacy `torch` format: the files of every rank."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.formats")
