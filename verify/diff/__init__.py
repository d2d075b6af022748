"""Compares two checkpoints of any formats, tensor by tensor, and measures how far differing ones are apart."""
