"""INT4 W4A16 in compressed-tensors' pack-quantized format: which tensors, which scales, which bytes.

May import ckptkit below app, and converters.
"""
