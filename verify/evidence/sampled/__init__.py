"""Compares samples of two checkpoints that must hold the same weights, without torch and bounded in bytes.

evidence` may.
"""
