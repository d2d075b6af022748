"""Reads what checks look at, once: files, expected tensors, values."""
