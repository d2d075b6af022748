"""Checks of INT4 weights and of the config that describes them."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "converters",
    "quant",
    "verify.check",
    "verify.checks.headers",
    "verify.evidence",
    "verify.issue",
    "verify.report",
    "verify.skip",
)
