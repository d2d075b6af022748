"""What every check is written with: the subject, issues, the two exceptions, the runner and the report."""
