"""Checks of what real Megatron and real SGLang made of the checkpoint."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "converters",
    "quant",
    "verify.check",
    "verify.checks.config",
    "verify.evidence",
    "verify.issue",
    "verify.report",
    "verify.witnesses",
)
