"""Checks of the loaded checkpoint in real engines, real Megatron and transformers."""
