"""Carries a plan into a destination: the copy loop, the journal to resume from, the rename at the end, the manifest."""
