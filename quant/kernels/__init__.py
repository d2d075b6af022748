"""Quantizing and packing in one pass, on CPUs and GPUs."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.transfer", "quant.formats")
