"""Quantization schemes with one protocol. A scheme is a module here and a row in `registry`."""
