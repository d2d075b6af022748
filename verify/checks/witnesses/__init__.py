"""Checks of what real Megatron and real SGLang made of the checkpoint.

May import what checks may.
"""
