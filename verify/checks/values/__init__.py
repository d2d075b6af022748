"""Checks of the values of the weights."""
