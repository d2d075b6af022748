"""Reads an HF config: values under every spelling, and the dimensions of a model."""
