"""Weights in 8-bit and 4-bit floats (FP8, MXFP8, MXFP4, NVFP4) in every spelling: one row of a table each."""
