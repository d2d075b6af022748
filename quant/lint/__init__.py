"""Finds what is wrong with an `ignore` list, and a list that all readers agree on."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "converters",
    "quant.formats",
    "quant.lists",
    "quant.patterns",
    "quant.selection",
)
