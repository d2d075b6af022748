"""Which tensors are packed: what the model is made of, and how each reader takes `ignore` and `targets`."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.formats", "converters", "quant.formats", "quant.patterns")
