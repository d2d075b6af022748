"""transformers as the reference for what a model computes: log-probabilities, texts, and single layers."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "converters",
    "quant.formats",
    "verify.evidence",
    "verify.skip",
    "verify.witnesses.process",
)
