"""Checks of settings: config, tokenizer and parallel sizes.

May import what checks may.
"""
