"""Checks of what the weights hold."""
