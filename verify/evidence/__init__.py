"""Reads the data of all checks once: files, expected tensors, values."""
