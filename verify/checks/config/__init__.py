"""Checks of settings: config, tokenizer and parallel sizes."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "converters",
    "verify.check",
    "verify.evidence",
    "verify.issue",
    "verify.launch",
    "verify.report",
)
