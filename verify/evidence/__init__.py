"""Reads what checks look at, once: files, expected tensors, values."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "ckptkit.transfer",
    "converters",
    "quant",
    "verify.issue",
    "verify.launch",
    "verify.options",
    "verify.report",
    "verify.skip",
)
