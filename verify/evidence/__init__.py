"""What checks look at, read once: files, expected tensors, values.

May import quant and converters, and no check.
"""
