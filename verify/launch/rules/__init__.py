"""What the trainers' own checks of their arguments refuse, as rules: tables, and functions of what a launch says."""

MAY_IMPORT = ("ckptkit.core", "verify.issue", "verify.launch", "verify.report")
