"""One file a model family: which `model_type`s, how its config is read, its rules, and all else that is particular to it.

May import ops, blocks and config.
"""
