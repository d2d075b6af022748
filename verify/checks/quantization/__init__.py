"""Checks of INT4 weights and of the config that describes them."""
