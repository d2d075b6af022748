"""Checks of PEFT's adapters, which are no models of their own."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "converters",
    "verify.check",
    "verify.evidence",
    "verify.issue",
)
