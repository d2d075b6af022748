"""The command line, the Python API, jobs and the demo."""

MAY_IMPORT = ("ckptkit.core", "ckptkit.storage", "ckptkit.formats", "ckptkit.transfer", "converters", "quant", "verify")
