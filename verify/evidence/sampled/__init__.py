"""Compares samples of two checkpoints that must hold the same weights, without torch and bounded in bytes.

evidence` may.
"""

MAY_IMPORT = ("ckptkit.core", "ckptkit.storage", "converters", "verify.evidence")
