"""Quantizing and packing in one pass, on CPUs and GPUs."""
