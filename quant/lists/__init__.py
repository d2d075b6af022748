"""Lists of unquantized modules in formats other than compressed-tensors': who reads which key, and how."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.formats", "converters", "quant.patterns", "quant.selection")
