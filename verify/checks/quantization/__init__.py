"""Checks of quantized weights and their config."""
