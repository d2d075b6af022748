"""Reads what checks look at, once: files, expected tensors, values.

May import quant and converters, and no check.
"""
