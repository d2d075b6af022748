"""Quantization: which tensors, which scales, which bytes."""
