"""vLLM as a witness: an adapter for loading, and what stands in for a GPU where there is none."""

MAY_IMPORT = (
    "ckptkit.formats",
    "quant",
    "verify.evidence",
    "verify.witnesses.loading",
    "verify.witnesses.process",
)
