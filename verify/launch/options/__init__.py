"""Options of a trainer: which there are, how argparse reads each, and what a misspelled one was meant to be."""

MAY_IMPORT = ("ckptkit.core", "converters.config", "converters.megatron", "verify.launch")
