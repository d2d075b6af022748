"""The framework of all checks: the subject, issues, two exceptions, the runner and the report."""
