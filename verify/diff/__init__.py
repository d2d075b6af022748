"""Compares two checkpoints of any formats, tensor by tensor, and measures how far differing ones are apart.

evidence` and everything below it.
"""

MAY_IMPORT = ("ckptkit.core", "ckptkit.storage", "ckptkit.formats", "converters", "quant", "verify.evidence")
