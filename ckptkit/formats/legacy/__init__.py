"""Megatron's legacy `torch` format: the files of every rank."""
