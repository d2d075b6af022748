"""Formats of quantized weights, to read and to write: INT4, FP8 and MXFP4."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.storage", "ckptkit.formats", "quant.patterns")
