"""The file formats of checkpoints, one folder each, and what tells them apart."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.storage")
