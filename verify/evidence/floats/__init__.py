"""Reads what is stored in 8-bit and 4-bit floats: parts and scales of each weight, and how far it is off its source."""
