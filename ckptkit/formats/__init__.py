"""The file formats of checkpoints, one folder each, and their detection."""
