"""Checks of weight updates that were published as deltas, alone and replayed onto their base."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "verify.check",
    "verify.evidence",
    "verify.issue",
)
