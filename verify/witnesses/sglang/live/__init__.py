"""A live SGLang engine on GPUs: the requests that trainers send it, and what its ranks write down."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "quant.formats",
    "verify.witnesses.live",
    "verify.witnesses.loading",
    "verify.witnesses.reference",
    "verify.witnesses.sglang",
)
