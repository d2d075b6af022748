"""Quantized tensors, of which there are none."""


class QuantizedTensor:
    """The class that all quantized tensors have."""
