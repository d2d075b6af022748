"""Megatron's torch_dist format: its names, reading it and writing it."""
