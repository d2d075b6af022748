"""Compares the files next to the weights of two checkpoints: tokenizer, chat templates, generation settings, code."""

MAY_IMPORT = (
    "ckptkit.core",
    "ckptkit.formats",
    "verify.evidence.side_files",
    "verify.report",
    "verify.skip",
    "verify.witnesses.process",
)
