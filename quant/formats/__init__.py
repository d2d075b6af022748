"""Formats of quantized weights, to read and to write: INT4 here, floats of 8 and 4 bits in `floats`."""
