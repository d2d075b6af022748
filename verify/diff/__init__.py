"""Compares two checkpoints of any formats, tensor by tensor, and measures how far differing ones are apart."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "converters",
    "verify.check",
    "verify.checks.config",
    "verify.evidence",
    "verify.opened",
    "verify.skip",
)
