"""Checks of settings: config, tokenizer and parallel sizes."""
