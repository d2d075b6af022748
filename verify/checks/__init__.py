"""One function a check, by subject."""

MAY_IMPORT = ()
