"""Checks of what the weights hold."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "ckptkit.storage",
    "ckptkit.transfer",
    "converters",
    "quant",
    "verify.check",
    "verify.checks.headers",
    "verify.evidence",
    "verify.issue",
    "verify.report",
    "verify.skip",
)
