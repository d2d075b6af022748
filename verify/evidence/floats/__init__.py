"""Reads weights in 8-bit and 4-bit floats: their parts and scales, and their distance from the source."""
