"""Checks of PEFT's adapters, which are no models of their own."""
