"""How a training job finds its weights, read from its launch."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "converters",
    "verify.check",
    "verify.checks.config",
    "verify.checks.headers",
    "verify.evidence",
    "verify.issue",
    "verify.options",
    "verify.report",
)
