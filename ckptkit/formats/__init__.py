"""The file formats of checkpoints, one folder each, and what tells them apart."""
