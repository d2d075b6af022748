"""Megatron-LM's own `load_checkpoint` and `save_checkpoint`, on several ranks."""
