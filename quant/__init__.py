"""Quantization: which tensors, which scales, which bytes.

May import ckptkit below app, and converters.
"""
