"""Proves a checkpoint: checks as data, and real Megatron and real SGLang as witnesses in subprocesses."""
