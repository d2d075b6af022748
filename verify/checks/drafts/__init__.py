"""Checks of draft models for speculative decoding that are models of their own."""
