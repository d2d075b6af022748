"""Formats of quantized weights, to read and to write: INT4, FP8 and MXFP4.

May import converters.
"""
