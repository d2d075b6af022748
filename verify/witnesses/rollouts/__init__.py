"""What slime or miles recorded of a rollout, held against what transformers makes of the checkpoint; needs no GPU.

witnesses.reference` and what starts a witness.
"""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "converters.config",
    "verify.evidence",
    "verify.skip",
    "verify.witnesses.loading",
    "verify.witnesses.process",
    "verify.witnesses.reference",
    "verify.witnesses.sglang",
)
