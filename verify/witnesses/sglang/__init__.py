"""Real SGLang as a witness: the job, the load, and what each parameter should hold."""

MAY_IMPORT = ("ckptkit.core", "quant", "verify.evidence", "verify.witnesses.loading", "verify.witnesses.process")
