"""Compares weights with their siblings in the same checkpoint."""

MAY_IMPORT = ("converters", "verify.evidence")
