"""Checks of headers, names and JSON files: no weight is read."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "converters",
    "quant",
    "verify.check",
    "verify.evidence",
    "verify.issue",
    "verify.report",
    "verify.skip",
)
