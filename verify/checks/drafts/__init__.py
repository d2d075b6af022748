"""Checks of draft models for speculative decoding."""
