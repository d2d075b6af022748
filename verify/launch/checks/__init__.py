"""Checks of how a training job is launched, which only preflight runs."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "ckptkit.transfer",
    "converters",
    "quant",
    "verify.check",
    "verify.checks.config",
    "verify.evidence",
    "verify.issue",
    "verify.launch",
    "verify.report",
)
