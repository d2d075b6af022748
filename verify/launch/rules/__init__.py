"""What trainers' own checks of their arguments refuse, and engines of a draft model: as tables and functions."""

MAY_IMPORT = ("ckptkit.core", "converters", "verify.issue", "verify.launch", "verify.report")
