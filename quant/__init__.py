"""Quantization: which tensors, which scales, which bytes."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.formats", "converters")
