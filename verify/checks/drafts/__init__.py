"""Checks of draft models for speculative decoding that are models of their own."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "converters",
    "verify.check",
    "verify.evidence",
    "verify.issue",
    "verify.skip",
)
