"""Real SGLang as a witness: the job, the load, and what each parameter should hold."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "quant",
    "verify.evidence",
    "verify.witnesses.loading",
    "verify.witnesses.process",
)
