"""A live engine: what it answers, and what it holds after weight updates. Knows no engine by name."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "ckptkit.storage",
    "converters",
    "verify.evidence",
    "verify.skip",
    "verify.witnesses.loading",
    "verify.witnesses.process",
    "verify.witnesses.reference",
    "verify.witnesses.registry",
)
