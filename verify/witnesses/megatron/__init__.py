"""Real Megatron as a witness: the job, the ranks that load it, and what each parameter should hold."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "ckptkit.transfer",
    "converters",
    "verify.evidence",
    "verify.skip",
    "verify.witnesses.loading",
    "verify.witnesses.process",
    "verify.witnesses.reference",
)
