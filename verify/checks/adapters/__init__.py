"""Checks of PEFT adapters."""
