"""Checks of what real Megatron and real SGLang made of the checkpoint."""
