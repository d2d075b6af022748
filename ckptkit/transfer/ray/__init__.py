"""Runs pieces of work as tasks on a Ray cluster."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.transfer")
