"""A live SGLang engine on GPUs: what it answers, and what it holds after weight updates."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "converters",
    "quant",
    "verify.evidence",
    "verify.skip",
    "verify.witnesses.loading",
    "verify.witnesses.process",
    "verify.witnesses.reference",
    "verify.witnesses.sglang",
)
