"""Compares the files next to the weights of two checkpoints: tokenizer, chat templates, generation settings, code."""
