"""Executes a plan: the copy loop, the journal for resuming, the final rename, and the manifest."""
