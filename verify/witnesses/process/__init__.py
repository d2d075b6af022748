"""Child processes of verification: start, limits, exit, and the files that they exchange."""
